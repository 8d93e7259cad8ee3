// A file descriptor that is closed when its owner goes.
#pragma once

#include <unistd.h>

#include <utility>

namespace fastpipe {

class SharedMemoryDescriptor final {
 public:
  SharedMemoryDescriptor() = default;
  explicit SharedMemoryDescriptor(int number) : number_(number) {}
  SharedMemoryDescriptor(const SharedMemoryDescriptor&) = delete;
  SharedMemoryDescriptor& operator=(const SharedMemoryDescriptor&) = delete;
  SharedMemoryDescriptor(SharedMemoryDescriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  SharedMemoryDescriptor& operator=(SharedMemoryDescriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~SharedMemoryDescriptor() {
    if (number_ >= 0) ::close(number_);
  }

  int number() const { return number_; }

 private:
  int number_ = -1;
};

}  // namespace fastpipe
