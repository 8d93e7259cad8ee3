// A rank's side of the shared memory of its host, for all the programs of a pipeline.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "clock.h"
#include "shared_memory_doorbell.h"
#include "shared_memory_host.h"
#include "shared_memory_layout.h"
#include "shared_memory_peer.h"
#include "shared_memory_segment.h"

namespace fastpipe {

class SharedMemoryLink final {
 public:
  // spin: how long to look before sleeping.
  SharedMemoryLink(std::int32_t rank, std::int32_t num_ranks, Clock::duration spin);
  SharedMemoryLink(std::int32_t rank, std::int32_t num_ranks)
      : SharedMemoryLink(rank, num_ranks, usual_spin(num_ranks)) {}

  std::int32_t rank() const { return rank_; }
  BoardAddress address() const;
  // Throws Error when its memory cannot be had, or is not what it should be.
  void connect(std::int32_t rank, const BoardAddress& address);

  const std::shared_ptr<SharedMemoryPeer>& peer(std::int32_t rank) const;
  SharedMemoryDoorbell doorbell() const { return SharedMemoryDoorbell(board_->at<Board>(0)->doorbell); }
  Clock::duration spin() const { return spin_; }

  // The next program's number. Every rank makes its programs in the same order.
  std::size_t number_program() { return num_programs_++; }
  // Shows the others the rings that this rank sends on in a program.
  void publish(std::size_t program, const SharedMemorySegment& rings, std::uint64_t fingerprint);

 private:
  std::int32_t rank_;
  std::uint64_t nonce_;
  Clock::duration spin_;
  std::shared_ptr<SharedMemorySegment> board_;
  std::vector<std::shared_ptr<SharedMemoryPeer>> peers_;  // by rank; null for this one
  std::size_t num_programs_ = 0;
};

}  // namespace fastpipe
