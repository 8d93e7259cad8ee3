// Annealing over orders, led by the critical path: what most changes are tried on.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/retime.h"

namespace fastpipe::plan {

// xorshift64*: a few lines in any language.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 0x2545F4914F6CDD1Du) {
    if (state_ == 0) state_ = 1;
  }
  uint64_t next() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 0x2545F4914F6CDD1Du;
  }
  int32_t below(int32_t limit) { return static_cast<int32_t>((next() >> 33) % static_cast<uint64_t>(limit)); }
  double unit() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }

 private:
  uint64_t state_;
};

// A task taken out of one place and put into another of its rank.
struct Shift {
  int32_t from;
  int32_t to;
};

class Search {
 public:
  Search(const Tasks& tasks, const int32_t* order, bool span, uint64_t seed);

  // False if the order given cannot run or does not fit into memory.
  bool begin();
  // Tries so many changes; a worse order is taken if it is worse by less than `heat`, times a random number. `heat`
  // falls from the first to the second.
  void improve(int64_t attempts, double hot, double cold);
  // The shortest order so far; what is searched stays where it is.
  std::vector<int32_t> best() const;
  double best_objective() const { return best_objective_; }

 private:
  bool propose();
  const std::vector<int32_t>& path();
  bool cross_stretch();
  int32_t chosen_task();
  int32_t follower(int32_t task, int32_t way) const;
  bool shift_chain(int32_t task, int32_t distance);
  bool shift_by(int32_t task, int32_t distance);
  bool fill_hole(int32_t task);
  void put(Shift shift);
  void rotate(Shift shift);
  void undo();
  bool try_out(double most);
  int32_t overflow(const Window& window);
  void touch(int32_t rank, int32_t low, int32_t high);
  bool make_room(int32_t rank, int32_t position);
  void forget_windows();
  int32_t earliest(int32_t task) const;
  int32_t latest(int32_t task) const;
  void accept();

  const Tasks& tasks_;
  Order order_;
  Retimer retimer_;
  Random random_;
  std::vector<double> level_;  // by position: what is held before the task there
  std::vector<Shift> shifts_;
  std::vector<int32_t> path_;
  bool path_is_old_ = false;
  std::vector<Shift> since_best_;  // what leads from the best order to this one, up to a length
  std::vector<int32_t> best_;      // beyond that it itself, else nothing
  double best_objective_ = 0.0;
  double best_score_ = 0.0;
  std::vector<Window> windows_;     // of the ranks with shifts
  std::vector<int32_t> window_of_;  // by rank, or nobody
};

}  // namespace fastpipe::plan
