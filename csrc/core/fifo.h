// A queue in a ring of memory that it keeps: once it is large enough, nothing is allocated.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace fastpipe {

template <typename Item>
class Fifo final {
 public:
  bool empty() const { return size_ == 0; }
  const Item& front() const { return items_[first_]; }

  void push_back(Item item) {
    if (size_ == items_.size()) grow();
    items_[(first_ + size_++) % items_.size()] = std::move(item);
  }
  void pop_front() {
    first_ = (first_ + 1) % items_.size();
    --size_;
  }
  void clear() { first_ = size_ = 0; }

 private:
  static constexpr std::size_t kAtFirst = 8;

  void grow() {
    std::vector<Item> larger(items_.empty() ? kAtFirst : 2 * items_.size());
    for (std::size_t i = 0; i < size_; ++i) larger[i] = std::move(items_[(first_ + i) % items_.size()]);
    items_ = std::move(larger);
    first_ = 0;
  }

  std::vector<Item> items_;
  std::size_t first_ = 0;
  std::size_t size_ = 0;
};

}  // namespace fastpipe
