// Another process of this host: whether it lives, and what it shares.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "shared_memory_descriptor.h"
#include "shared_memory_segment.h"

namespace fastpipe {

// What a rank tells the others, by any means, so that they find its memory.
struct BoardAddress {
  pid_t process;
  int descriptor;
  std::uint64_t nonce;  // so that nothing else is taken for it
};

class SharedMemoryProcess final {
 public:
  SharedMemoryProcess(std::int32_t rank, pid_t process);

  std::int32_t rank() const { return rank_; }
  bool alive() const;
  // The process's own memory; throws Error when it is not what it should be.
  std::shared_ptr<SharedMemorySegment> open(int descriptor, std::size_t bytes) const;

 private:
  std::int32_t rank_;
  pid_t process_;
  SharedMemoryDescriptor watch_;  // of the process: readable when it is dead, and never another's that got its number
};

}  // namespace fastpipe
