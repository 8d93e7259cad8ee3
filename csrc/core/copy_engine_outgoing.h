// The sender's end of a channel whose messages are copied by an engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "copy_engine_codec.h"
#include "copy_engine_layout.h"
#include "copy_engine_link.h"
#include "copy_engine_places.h"
#include "copy_engine_watch.h"

namespace fastpipe {

class CopyOutgoing final {
 public:
  CopyOutgoing(std::shared_ptr<CopyEngineLink> link, const CopyPlaces& places, const Channel& channel);
  CopyOutgoing(const CopyOutgoing&) = delete;
  CopyOutgoing& operator=(const CopyOutgoing&) = delete;
  ~CopyOutgoing();

  std::int32_t peer() const { return peer_; }
  // The receiver's words, which lie in exposed memory, once it has shown them.
  bool opened() const { return words_ != nullptr; }
  void open(CopyWords& words, CopyWatch& watch);
  // Before a step: whether the receiver has shown places for messages of so many bytes. They are open then. Throws
  // Error where it had no memory for them.
  bool prepare(std::size_t bytes);

  // Copies the pieces when the place is granted and what the current queue has now is done; `copied` comes after that.
  void send(const std::vector<CopyPart>& parts, CopyMark& copied);
  // In place of a message of so many bytes.
  void stand_in(std::size_t bytes, CopyMark& copied);
  // Whether all that was sent has been copied.
  bool idle() const { return last_->reached(); }

 private:
  std::byte* begin();
  void end(CopyMark& copied);

  std::shared_ptr<CopyEngineLink> link_;
  const CopyPlaces& channel_;
  std::int32_t peer_;
  CopyQueue& queue_;  // the link's
  std::unique_ptr<CopyMark> made_;
  std::unique_ptr<CopyMark> last_;
  CopyWords* words_ = nullptr;
  CopyWatch::Line* line_ = nullptr;
  std::vector<std::shared_ptr<CopyMemory>> memories_;  // the last is in use
  std::size_t place_bytes_ = 0;
  std::uint64_t sent_ = 0;
};

}  // namespace fastpipe
