// The memory in which a channel's messages lie, on the sender's side.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "shared_memory_layout.h"
#include "shared_memory_segment.h"

namespace fastpipe {

// Where a message may be written.
struct SharedMemoryCell {
  CellWords* words = nullptr;  // null: there is none now
  std::byte* data = nullptr;
  std::uint64_t segment = 0;
  std::uint64_t offset = 0;
  int descriptor = -1;
  std::size_t segment_bytes = 0;
};

class SharedMemoryCells final {
 public:
  // slots: how many of the channel's receives the receiver may have posted and not freed.
  // num_messages: how many a step sends.
  SharedMemoryCells(std::int32_t slots, std::int32_t num_messages) : slots_(slots), num_messages_(num_messages) {}

  // A free cell for that many bytes; there is one, or memory for one is made, unless `slots` and a few more cells are
  // in use that the program will free.
  SharedMemoryCell find(std::size_t bytes);
  // Gives back what larger cells have replaced.
  void sweep();

 private:
  struct Part {
    std::shared_ptr<SharedMemorySegment> memory;
    std::uint64_t number;
    std::size_t capacity;  // of a cell
    std::size_t num_cells;

    std::size_t stride() const { return sizeof(CellWords) + capacity; }
    std::size_t offset(std::size_t cell) const { return sizeof(CellSegmentWords) + cell * stride(); }
    CellWords& words(std::size_t cell) const { return *memory->at<CellWords>(offset(cell)); }
    bool retired() const { return memory->at<CellSegmentWords>(0)->retired.load(std::memory_order_relaxed) != 0; }
    bool idle() const;
  };

  std::size_t wanted(std::size_t bytes) const;
  SharedMemoryCell cell_of(const Part& part, std::size_t index) const;
  void grow(std::size_t bytes, std::size_t num_cells);
  void retire_below(std::size_t capacity);

  std::int32_t slots_;
  std::int32_t num_messages_;
  std::vector<Part> parts_;
  std::uint64_t num_parts_ = 0;  // ever made
};

}  // namespace fastpipe
