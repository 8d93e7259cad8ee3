#include "shared_memory_cells.h"

#include <algorithm>
#include <utility>

namespace fastpipe {

namespace {

// So many messages more than the receiver asks for, so that the sender can run ahead while it computes; of small ones
// as many as a step has.
constexpr std::size_t kAhead = 2;
constexpr std::size_t kSmallBytes = std::size_t{1} << 20;

}  // namespace

bool SharedMemoryCells::Part::idle() const {
  for (std::size_t cell = 0; cell < num_cells; ++cell) {
    if (words(cell).state.load() != kCellFree) return false;
  }
  return true;
}

SharedMemoryCell SharedMemoryCells::find(std::size_t bytes) {
  std::size_t usable = 0;
  for (const Part& part : parts_) {
    if (part.capacity < bytes || part.retired()) continue;
    // The first that is free: few cells are touched, and these stay in the cache.
    for (std::size_t cell = 0; cell < part.num_cells; ++cell) {
      const std::uint64_t state = part.words(cell).state.load();
      if (state == kCellFree) return cell_of(part, cell);
      if ((state & kHeldMark) == 0) ++usable;
    }
  }
  const std::size_t enough = wanted(bytes);
  if (usable >= enough) return {};
  grow(bytes, enough - usable);
  return cell_of(parts_.back(), 0);
}

std::size_t SharedMemoryCells::wanted(std::size_t bytes) const {
  const std::size_t small = std::min<std::size_t>(num_messages_, kSmallBytes / std::max<std::size_t>(bytes, 1));
  return std::max<std::size_t>(slots_ + kAhead, small);
}

SharedMemoryCell SharedMemoryCells::cell_of(const Part& part, std::size_t index) const {
  const std::size_t offset = part.offset(index);
  return {&part.words(index),
          part.memory->data() + offset + sizeof(CellWords),
          part.number,
          offset,
          part.memory->descriptor(),
          part.memory->size()};
}

void SharedMemoryCells::grow(std::size_t bytes, std::size_t num_cells) {
  std::size_t largest = 0;
  for (const Part& part : parts_) largest = std::max(largest, part.capacity);
  // Twice the last, so that messages that grow bit by bit do not leave one segment each behind.
  const std::size_t capacity = whole_lines(bytes > largest ? std::max(bytes, 2 * largest) : largest);
  Part part{nullptr, num_parts_ + 1, std::max(capacity, kSharedLine), num_cells};
  part.memory = SharedMemorySegment::make(part.offset(num_cells));
  retire_below(part.capacity);
  parts_.push_back(std::move(part));
  ++num_parts_;
}

void SharedMemoryCells::retire_below(std::size_t capacity) {
  for (const Part& part : parts_) {
    if (part.capacity < capacity) part.memory->at<CellSegmentWords>(0)->retired.store(1);
  }
}

void SharedMemoryCells::sweep() {
  const auto done = [](const Part& part) { return part.retired() && part.idle(); };
  parts_.erase(std::remove_if(parts_.begin(), parts_.end(), done), parts_.end());
}

}  // namespace fastpipe
