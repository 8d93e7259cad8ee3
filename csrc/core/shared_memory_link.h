// A rank's side of the shared memory of its host, for all the programs of a pipeline.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "clock.h"
#include "shared_memory_board.h"
#include "shared_memory_doorbell.h"
#include "shared_memory_layout.h"
#include "shared_memory_peer.h"
#include "shared_memory_segment.h"

namespace fastpipe {

class SharedMemoryLink final {
 public:
  // spin: how long to look before sleeping.
  SharedMemoryLink(std::int32_t rank, std::int32_t num_ranks, Clock::duration spin)
      : rank_(rank), spin_(spin), peers_(num_ranks) {}

  std::int32_t rank() const { return rank_; }
  std::size_t num_ranks() const { return peers_.size(); }
  BoardAddress address() const { return board_.address(); }
  // Throws Error when its memory cannot be had, or is not what it should be.
  void connect(std::int32_t rank, const BoardAddress& address);

  const std::shared_ptr<SharedMemoryPeer>& peer(std::int32_t rank) const;
  SharedMemoryDoorbell doorbell() const { return board_.doorbell(); }
  Clock::duration spin() const { return spin_; }
  // This rank's own word; see LinkBoard.
  SharedWord& let_go() const { return board_.words().let_go; }
  // One that has let go of its queues, and because of whom; nothing when all wait for each other.
  std::optional<std::pair<std::int32_t, std::int32_t>> find_let_go() const;

  // The next program's number. Every rank makes its programs in the same order.
  std::size_t number_program() { return num_programs_++; }
  // Shows the others the rings that this rank sends on in a program.
  void publish(std::size_t program, const SharedMemorySegment& rings, std::uint64_t fingerprint);
  // Shows the others the words of the channels on which this rank receives by copy engines.
  void publish_copies(const SharedMemorySegment& words);

 private:
  std::int32_t rank_;
  Clock::duration spin_;
  SharedMemoryBoard<LinkBoard> board_;
  std::vector<std::shared_ptr<SharedMemoryPeer>> peers_;  // by rank; null for this one
  std::size_t num_programs_ = 0;
};

}  // namespace fastpipe
