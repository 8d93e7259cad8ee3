// The sender's end of a channel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "codec.h"
#include "fifo.h"
#include "payload.h"
#include "shared_memory_cells.h"
#include "shared_memory_doorbell.h"
#include "shared_memory_layout.h"
#include "shared_memory_peer.h"
#include "shared_memory_segment.h"

namespace fastpipe {

// One message on its way.
struct SharedMemorySend {
  enum class State { kIdle, kPosted, kCopied };

  State state = State::kIdle;
  std::int32_t channel = 0;
  std::int32_t stage = 0;  // that consumes it
  std::int32_t microbatch = 0;
  const Payload* from = nullptr;  // null: a stand-in
  bool announced = false;
  double completed = 0;
};

class SharedMemoryOutbox final {
 public:
  // ring: zeroed memory for the words and `num_entries` entries, kept by the caller.
  SharedMemoryOutbox(const Codec& codec, std::int32_t channel, RingWords& ring, std::uint64_t num_entries,
                     SharedMemoryCells cells, std::shared_ptr<SharedMemoryPeer> peer);

  // Copies and goes on; where there is no room the message waits for advance(), and `send` stays posted. When it
  // throws, nothing has been sent.
  void post(SharedMemorySend& send);
  // Copies what has room now. True: nothing waits any more. When it throws, a stand-in takes the message's place.
  bool advance();
  bool idle() const { return queue_.empty(); }
  void drop() { queue_.clear(); }
  void sweep() { cells_.sweep(); }
  const SharedMemoryPeer& peer() const { return *peer_; }

 private:
  bool copy(SharedMemorySend& send);
  bool copy_payload(const SharedMemorySend& send, RingEntry& entry);
  void publish(SharedMemorySend& send, const RingEntry& entry);
  void give_up_front();

  const Codec& codec_;
  std::int32_t channel_;
  RingWords& ring_;
  RingEntry* entries_;
  SharedMemoryCells cells_;
  std::shared_ptr<SharedMemoryPeer> peer_;
  std::uint64_t sent_ = 0;
  Fifo<SharedMemorySend*> queue_;
};

}  // namespace fastpipe
