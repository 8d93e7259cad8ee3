#include "shared_memory_lease.h"

#include <unistd.h>

#include <utility>

namespace fastpipe {

SharedMemoryLease::SharedMemoryLease(std::shared_ptr<const CellSender> sender,
                                     std::shared_ptr<SharedMemorySegment> segment, CellWords& cell)
    : sender_(std::move(sender)), segment_(std::move(segment)), cell_(&cell), process_(::getpid()) {}

void SharedMemoryLease::swap(SharedMemoryLease& other) noexcept {
  sender_.swap(other.sender_);
  segment_.swap(other.segment_);
  std::swap(cell_, other.cell_);
  std::swap(process_, other.process_);
}

SharedMemoryLease::~SharedMemoryLease() {
  // A forked process (a data loader's, say) has copies of the tensors and shares their memory: it must not free it.
  if (cell_ == nullptr || ::getpid() != process_) return;
  cell_->state.store(kCellFree);
  sender_->make_known();
}

void SharedMemoryWatch::end() {
  CellWords* const cell = std::exchange(cell_, nullptr);
  std::uint64_t expected = used_;
  // It fails when the cell is free, or has the next message already, whose number differs.
  if (cell != nullptr && cell->state.compare_exchange_strong(expected, used_ | kHeldMark)) sender_->make_known();
  segment_.reset();
  sender_.reset();
}

}  // namespace fastpipe
