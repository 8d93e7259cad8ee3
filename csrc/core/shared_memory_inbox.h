// The receiver's end of a channel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include "codec.h"
#include "shared_memory_layout.h"
#include "shared_memory_lease.h"
#include "shared_memory_peer.h"
#include "shared_memory_segment.h"

namespace fastpipe {

// A message as it arrives.
struct SharedMemoryMail {
  std::int32_t stage = 0;  // that consumes it
  std::int32_t microbatch = 0;
  bool stand_in = false;
  CellBytes bytes{};
  SharedMemoryLease lease;
  SharedMemoryWatch watch;
};

class SharedMemoryInbox final {
 public:
  SharedMemoryInbox(std::int32_t channel, std::shared_ptr<SharedMemoryPeer> peer, std::size_t program,
                    std::uint64_t fingerprint);

  // Whether a message is there; the rings need not be there yet.
  bool arrived();
  // To be called when one is.
  SharedMemoryMail take();
  const SharedMemoryPeer& peer() const { return *peer_; }

 private:
  bool open();
  const std::shared_ptr<SharedMemorySegment>& segment_of(const RingEntry& entry);
  void open_mail(const RingEntry& entry, SharedMemoryMail& mail);
  void sweep();

  std::int32_t channel_;
  std::shared_ptr<SharedMemoryPeer> peer_;
  std::size_t program_;
  std::uint64_t fingerprint_;
  std::shared_ptr<const CellSender> sender_;
  RingWords* ring_ = nullptr;
  std::uint64_t taken_ = 0;
  std::map<std::uint64_t, std::shared_ptr<SharedMemorySegment>> segments_;  // by the sender's number
};

}  // namespace fastpipe
