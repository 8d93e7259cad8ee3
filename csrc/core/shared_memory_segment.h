// Memory that two processes map. It has no name, so nobody can guess it and nothing is left behind when all who map it
// are gone, however they went. The one who made it gives its descriptor's number to others, who open it through /proc.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>

#include "shared_memory_descriptor.h"

namespace fastpipe {

class SharedMemorySegment final {
 public:
  // Zeroed and sealed: its size can never change, so that nobody can be made to fault on it.
  static std::shared_ptr<SharedMemorySegment> make(std::size_t bytes);
  // What another process made: refused unless it is sealed memory of the same user and of that size.
  static std::shared_ptr<SharedMemorySegment> open(pid_t owner, int descriptor, std::size_t bytes);

  SharedMemorySegment(SharedMemoryDescriptor descriptor, std::size_t bytes);
  SharedMemorySegment(const SharedMemorySegment&) = delete;
  SharedMemorySegment& operator=(const SharedMemorySegment&) = delete;
  ~SharedMemorySegment();

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  // By which others open it; -1 where it was opened itself.
  int descriptor() const { return descriptor_.number(); }
  template <typename T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(data_ + offset);
  }

 private:
  void forget_descriptor() { descriptor_ = SharedMemoryDescriptor(); }

  SharedMemoryDescriptor descriptor_;
  std::byte* data_;
  std::size_t size_;
};

}  // namespace fastpipe
