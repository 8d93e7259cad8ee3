// A board: memory that one rank of a host writes and all others read, found by its address.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <memory>
#include <string>

#include "errors.h"
#include "shared_memory_doorbell.h"
#include "shared_memory_host.h"
#include "shared_memory_process.h"
#include "shared_memory_segment.h"

namespace fastpipe {

// Words: what lies on it; it begins with a magic number, a nonce and a doorbell.
template <typename Words>
class SharedMemoryBoard final {
 public:
  // This rank's own.
  SharedMemoryBoard() : memory_(SharedMemorySegment::make(sizeof(Words))) {
    words().magic = Words::kMagic;
    words().nonce = random_nonce();
  }
  // Another's. Throws Error when its memory cannot be had, or is not what it should be.
  SharedMemoryBoard(const SharedMemoryProcess& owner, const BoardAddress& address)
      : memory_(owner.open(address.descriptor, sizeof(Words))) {
    if (words().magic == Words::kMagic && words().nonce == address.nonce) return;
    throw Error("shared memory: what rank " + std::to_string(owner.rank()) +
                " gave is not its board; run the same version of fastpipe on every rank");
  }

  // Of this rank's own.
  BoardAddress address() const { return {::getpid(), memory_->descriptor(), words().nonce}; }
  Words& words() const { return *memory_->template at<Words>(0); }
  SharedMemoryDoorbell doorbell() const { return SharedMemoryDoorbell(words().doorbell); }

 private:
  std::shared_ptr<SharedMemorySegment> memory_;
};

}  // namespace fastpipe
