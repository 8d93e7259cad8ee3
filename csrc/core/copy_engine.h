// What the copy-engine transport needs of a device: memory that other processes open, streams, and flags that streams
// write and wait for. csrc/cuda has the one for CUDA; tests have one of threads.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "shared_memory_layout.h"
#include "shared_memory_segment.h"

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

// A stream: what it is given is done in order, and nobody who gives it something waits.
class CopyQueue {
 public:
  CopyQueue() = default;
  CopyQueue(const CopyQueue&) = delete;
  CopyQueue& operator=(const CopyQueue&) = delete;
  virtual ~CopyQueue() = default;

  virtual void copy(std::byte* to, const std::byte* from, std::size_t bytes) = 0;
  virtual void zero(std::byte* to, std::size_t bytes) = 0;
  // Of a flag in exposed memory. Who sees the value sees all that the queue had done before.
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

}  // namespace fastpipe
