// Another rank of this host, as a process and by what it shares.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "shared_memory_descriptor.h"
#include "shared_memory_doorbell.h"
#include "shared_memory_layout.h"
#include "shared_memory_segment.h"

namespace fastpipe {

// What a rank tells the others, by any means, so that they find its board.
struct BoardAddress {
  pid_t process;
  int descriptor;
  std::uint64_t nonce;  // so that nothing else is taken for it
};

class SharedMemoryPeer final {
 public:
  SharedMemoryPeer(std::int32_t rank, const BoardAddress& address);

  std::int32_t rank() const { return rank_; }
  bool alive() const;
  SharedMemoryDoorbell doorbell() const { return SharedMemoryDoorbell(board().doorbell); }
  // The process's own memory; throws Error when it is not what it should be.
  std::shared_ptr<SharedMemorySegment> open(int descriptor, std::size_t bytes) const;
  // The rings that it sends on in a program; null as long as it has none.
  std::shared_ptr<SharedMemorySegment> rings(std::size_t program, std::uint64_t fingerprint) const;

 private:
  Board& board() const { return *board_->at<Board>(0); }

  std::int32_t rank_;
  pid_t process_;
  SharedMemoryDescriptor watch_;  // of the process: readable when it is dead, and never another's that got its number
  std::shared_ptr<SharedMemorySegment> board_;
};

}  // namespace fastpipe
