// The receiver's end of a channel whose messages are copied by an engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "copy_engine_layout.h"
#include "copy_engine_link.h"
#include "copy_engine_loan.h"
#include "copy_engine_places.h"
#include "copy_engine_watch.h"

namespace fastpipe {

class CopyIncoming final {
 public:
  // words: zeroed, in `segment`, which is exposed.
  CopyIncoming(std::shared_ptr<CopyEngineLink> link, const CopyPlaces& places,
               std::shared_ptr<SharedMemorySegment> segment, CopyWords& words, const Channel& channel,
               CopyWatch& watch);
  CopyIncoming(const CopyIncoming&) = delete;
  CopyIncoming& operator=(const CopyIncoming&) = delete;
  ~CopyIncoming();

  // Before a step: places for messages of so many bytes, shown to the sender. Throws Error, with the sender told, where
  // there is no memory.
  void prepare(std::size_t bytes);
  // The next message may come as soon as its place is unused. Its number.
  std::uint64_t post();
  // Makes the current queue wait for a message. Not active: it is known to be a stand-in.
  CopyLoan take(std::uint64_t message);
  std::int32_t peer() const { return peer_; }
  // Whether no queue has anything to do with the words any more.
  bool idle() const { return granted_->reached() && waited_->reached(); }
  // Whether something lies in a place.
  bool holds(const std::byte* data) const;

 private:
  bool is_stand_in(std::uint64_t message) const;

  std::shared_ptr<CopyEngineLink> link_;
  const CopyPlaces& channel_;
  std::shared_ptr<SharedMemorySegment> segment_;
  CopyWords& words_;
  std::int32_t peer_;
  CopyWatch::Line& line_;
  CopyQueue& queue_;                   // the link's
  std::unique_ptr<CopyMark> granted_;  // of the last message that was posted
  std::unique_ptr<CopyMark> waited_;   // for the last that was taken: for the others there is nothing to wait then
  std::vector<std::shared_ptr<CopyPlace>> places_;
  std::vector<std::shared_ptr<CopyMemory>> memories_;  // the last is in use; the sender may have opened the others
  std::size_t place_bytes_ = 0;
  std::uint64_t posted_ = 0;
};

}  // namespace fastpipe
