// Another rank of this host, as a process and by what it shares.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "shared_memory_board.h"
#include "shared_memory_doorbell.h"
#include "shared_memory_layout.h"
#include "shared_memory_process.h"
#include "shared_memory_segment.h"

namespace fastpipe {

class SharedMemoryPeer final {
 public:
  SharedMemoryPeer(std::int32_t rank, const BoardAddress& address);

  std::int32_t rank() const { return process_.rank(); }
  bool alive() const { return process_.alive(); }
  SharedMemoryDoorbell doorbell() const { return board_.doorbell(); }
  // See LinkBoard.
  std::uint32_t let_go() const { return board_.words().let_go.load(); }
  // The process's own memory; throws Error when it is not what it should be.
  std::shared_ptr<SharedMemorySegment> open(int descriptor, std::size_t bytes) const {
    return process_.open(descriptor, bytes);
  }
  // The rings that it sends on in a program; null as long as it has none.
  std::shared_ptr<SharedMemorySegment> rings(std::size_t program, std::uint64_t fingerprint) const;
  // The words of the channels on which it receives by copy engines; null as long as it has none.
  std::shared_ptr<SharedMemorySegment> copies() const;

 private:
  SharedMemoryProcess process_;
  SharedMemoryBoard<LinkBoard> board_;
};

}  // namespace fastpipe
