// What the copy-engine transport needs of a device: memory that other processes open, streams, and flags that streams
// write and wait for; and a message where it arrived. csrc/cuda has the engine of CUDA, tests have one of threads.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "host_memory.h"

namespace fastpipe {

// By which another process opens memory: bytes that mean something to the engine alone.
using CopyTicket = std::array<std::byte, 64>;

// Memory of the device, until it is destroyed.
class CopyMemory {
 public:
  CopyMemory() = default;
  CopyMemory(const CopyMemory&) = delete;
  CopyMemory& operator=(const CopyMemory&) = delete;
  virtual ~CopyMemory() = default;
  virtual std::byte* data() const = 0;
  virtual std::size_t size() const = 0;
};

// A point in a queue; a new one has been reached.
class CopyMark {
 public:
  CopyMark() = default;
  CopyMark(const CopyMark&) = delete;
  CopyMark& operator=(const CopyMark&) = delete;
  virtual ~CopyMark() = default;
  // Never waits.
  virtual bool reached() const = 0;
};

// A stream: work is done in order, and no host waits for it.
class CopyQueue {
 public:
  CopyQueue() = default;
  CopyQueue(const CopyQueue&) = delete;
  CopyQueue& operator=(const CopyQueue&) = delete;
  virtual ~CopyQueue() = default;

  virtual void copy(std::byte* to, const std::byte* from, std::size_t bytes) = 0;
  virtual void zero(std::byte* to, std::size_t bytes) = 0;
  // Of a flag in exposed memory. A reader that sees the value sees all that the queue had done before.
  virtual void write(SharedWord& flag, std::uint32_t value) = 0;
  // Until the flag is `value` or, on the circle of 32 bits, beyond it.
  virtual void wait(SharedWord& flag, std::uint32_t value) = 0;
  virtual void record(CopyMark& mark) = 0;
  virtual void wait(const CopyMark& mark) = 0;
};

// All of these throw Error.
class CopyEngine {
 public:
  CopyEngine() = default;
  CopyEngine(const CopyEngine&) = delete;
  CopyEngine& operator=(const CopyEngine&) = delete;
  virtual ~CopyEngine() = default;

  virtual std::shared_ptr<CopyMemory> allocate(std::size_t bytes) = 0;
  virtual CopyTicket ticket(const CopyMemory& memory) = 0;
  // In another process than the one that allocated it, which must keep it as long as it is open.
  virtual std::shared_ptr<CopyMemory> open(const CopyTicket& ticket) = 0;
  // As long as what it returns lives, queues can write and wait for flags in the segment.
  virtual std::shared_ptr<void> expose(std::shared_ptr<SharedMemorySegment> segment) = 0;
  virtual std::unique_ptr<CopyQueue> make_queue() = 0;
  virtual std::unique_ptr<CopyMark> make_mark() = 0;
  // Where the calling thread's work goes now; valid until it asks again.
  virtual CopyQueue& current() = 0;
};

// That of a CUDA device, in csrc/cuda. Throws Error where the device or its driver cannot do what is asked of it.
std::shared_ptr<CopyEngine> make_cuda_copy_engine(int device);

// A piece of a payload. In a place they lie one after the other, each from a whole block on.
struct CopyPart {
  const std::byte* data;
  std::size_t bytes;
};

// Tensors begin where an allocator of a device would put them: kernels are chosen by it, and with them the last bits.
constexpr std::size_t whole_blocks(std::size_t bytes) {
  constexpr std::size_t kBlock = 512;
  return (bytes + kBlock - 1) / kBlock * kBlock;
}

// A place on the receiver's side.
struct CopyPlace {
  explicit CopyPlace(std::unique_ptr<CopyMark> mark) : unused(std::move(mark)) {}

  std::unique_ptr<CopyMark> unused;  // reached when nothing uses the last message any more
  bool lent = false;
};

// A message where it arrived. Until the loan ends, its place is not granted again.
class CopyLoan final {
 public:
  CopyLoan() = default;
  CopyLoan(std::shared_ptr<CopyEngine> engine, std::shared_ptr<CopyPlace> place, std::shared_ptr<CopyMemory> memory,
           std::byte* data)
      : engine_(std::move(engine)), place_(std::move(place)), memory_(std::move(memory)), data_(data) {
    place_->lent = true;
  }
  CopyLoan(CopyLoan&&) noexcept = default;
  CopyLoan& operator=(CopyLoan&&) noexcept = default;

  bool active() const { return place_ != nullptr; }
  std::byte* data() const { return data_; }
  // To be held by whoever points into it.
  const std::shared_ptr<CopyMemory>& memory() const { return memory_; }
  // What the calling thread's current queue has by now is the last that uses the message.
  void end() {
    engine_->current().record(*place_->unused);
    place_->lent = false;
    *this = CopyLoan();
  }

 private:
  std::shared_ptr<CopyEngine> engine_;
  std::shared_ptr<CopyPlace> place_;
  std::shared_ptr<CopyMemory> memory_;
  std::byte* data_ = nullptr;
};

}  // namespace fastpipe
