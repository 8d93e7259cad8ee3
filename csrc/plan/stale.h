// Stale: the positions of an order whose times have to be found anew.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "plan/tasks.h"

namespace fastpipe::plan {

// A bit for every position; a rank's begin in a word of their own. Each has a time by which the ranks are compared.
class Stale {
 public:
  explicit Stale(const Tasks& tasks)
      : tasks_(tasks), times_(tasks.size()), words_(tasks.num_ranks() + 1), front_(tasks.num_ranks()) {
    for (int32_t rank = 0; rank < tasks.num_ranks(); ++rank) {
      words_[rank + 1] = words_[rank] + (tasks.last(rank) - tasks.first(rank) + kBits - 1) / kBits;
      front_[rank] = tasks.last(rank);
    }
    bits_.resize(words_.back());
    front_times_.resize(tasks.num_ranks(), kNever);
  }

  // When the task of the position starts; of positions that are not stale.
  void set_time(int32_t position, double time) { times_[position] = time; }

  void mark(int32_t position, int32_t rank) {
    const int32_t bit = position - tasks_.first(rank);
    bits_[words_[rank] + bit / kBits] |= uint64_t{1} << (bit % kBits);
    if (position < front_[rank]) {
      front_[rank] = position;
      front_times_[rank] = times_[position];
    }
  }

  // The rank whose first stale position is the earliest, or nobody.
  int32_t earliest_rank() const {
    int32_t found = kNobody;
    double least = kNever;
    for (int32_t rank = 0; rank < tasks_.num_ranks(); ++rank) {
      found = front_times_[rank] < least ? rank : found;
      least = std::min(least, front_times_[rank]);
    }
    return found;
  }

  bool any(int32_t rank) const { return front_[rank] != tasks_.last(rank); }

  // The time of a rank's first stale position; never, where it has none.
  double time(int32_t rank) const { return front_times_[rank]; }

  // Takes a rank's first stale position.
  int32_t take(int32_t rank) {
    const int32_t position = front_[rank];
    const int32_t bit = position - tasks_.first(rank);
    int32_t word = words_[rank] + bit / kBits;
    bits_[word] &= ~(uint64_t{1} << (bit % kBits));
    while (bits_[word] == 0 && word + 1 < words_[rank + 1]) ++word;
    const bool none = bits_[word] == 0;
    const int32_t next = tasks_.first(rank) + (word - words_[rank]) * kBits + (none ? 0 : __builtin_ctzll(bits_[word]));
    front_[rank] = none ? tasks_.last(rank) : next;
    front_times_[rank] = none ? kNever : times_[next];
    return position;
  }

  void clear() {
    for (int32_t rank = 0; rank < tasks_.num_ranks(); ++rank) {
      if (front_[rank] == tasks_.last(rank)) continue;
      std::fill(bits_.begin() + words_[rank], bits_.begin() + words_[rank + 1], 0);
      front_[rank] = tasks_.last(rank);
      front_times_[rank] = kNever;
    }
  }

 private:
  static constexpr int32_t kBits = 64;
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  const Tasks& tasks_;
  std::vector<double> times_;  // by position
  std::vector<uint64_t> bits_;
  std::vector<int32_t> words_;       // by rank: the first of its words
  std::vector<int32_t> front_;       // by rank: its first stale position, or its last
  std::vector<double> front_times_;  // by rank
};

}  // namespace fastpipe::plan
