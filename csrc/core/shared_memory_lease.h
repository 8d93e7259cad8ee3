// A message where it arrived. While its lease lives, the sender leaves the cell alone.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>

#include "shared_memory_layout.h"
#include "shared_memory_peer.h"
#include "shared_memory_segment.h"

namespace fastpipe {

// Who has to know when a cell is free.
struct CellSender {
  std::shared_ptr<SharedMemorySegment> rings;
  const RingWords* ring;
  std::shared_ptr<SharedMemoryPeer> peer;

  // After a change that may make room.
  void make_known() const {
    if (ring->starved.load() != 0) peer->doorbell().ring_always();
  }
};

class SharedMemoryLease final {
 public:
  SharedMemoryLease(std::shared_ptr<const CellSender> sender, std::shared_ptr<SharedMemorySegment> segment,
                    CellWords& cell);
  SharedMemoryLease() = default;
  SharedMemoryLease(SharedMemoryLease&& other) noexcept { swap(other); }
  SharedMemoryLease& operator=(SharedMemoryLease&& other) noexcept {
    SharedMemoryLease(std::move(other)).swap(*this);
    return *this;
  }
  // In any thread: the last tensor may die where the user drops it.
  ~SharedMemoryLease();

 private:
  void swap(SharedMemoryLease& other) noexcept;

  std::shared_ptr<const CellSender> sender_;
  std::shared_ptr<SharedMemorySegment> segment_;
  CellWords* cell_ = nullptr;
  pid_t process_ = 0;
};

// Sees whether a cell that the program has freed is really free.
class SharedMemoryWatch final {
 public:
  SharedMemoryWatch() = default;
  SharedMemoryWatch(std::shared_ptr<const CellSender> sender, std::shared_ptr<SharedMemorySegment> segment,
                    CellWords& cell)
      : sender_(std::move(sender)), segment_(std::move(segment)), cell_(&cell), used_(cell.state.load()) {}

  bool empty() const { return cell_ == nullptr; }
  // The program has freed it: if it is not free, the sender is told not to count on it. Then the watch is over.
  void end();

 private:
  std::shared_ptr<const CellSender> sender_;
  std::shared_ptr<SharedMemorySegment> segment_;
  CellWords* cell_ = nullptr;
  std::uint64_t used_ = 0;
};

}  // namespace fastpipe
