// The search for a better order: tasks, the times of an order and what of them is to be found anew, annealing. (The
// order that it begins with is made by list scheduling, in search.cpp.)
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "plan/plan.h"

namespace fastpipe::plan {

// Tasks: the actions of a schedule as the planner's search sees them. Numbers, and what waits for what; nothing of
// stages and microbatches. fastpipe/planner/tasks.py makes them and says what each field is.
constexpr int32_t kNobody = -1;

// Numbers side by side, of somebody else.
struct Span {
  const int32_t* first;
  const int32_t* last;
  const int32_t* begin() const { return first; }
  const int32_t* end() const { return last; }
};

// Rows of numbers of different length.
class Lists {
 public:
  Lists() = default;
  explicit Lists(size_t rows) : first_(rows + 1, 0) {}
  Span operator[](int32_t row) const { return {items_.data() + first_[row], items_.data() + first_[row + 1]}; }

  // Row a holds every b with an edge a -> b, in the order of `each`, which calls its argument with every edge twice.
  template <typename Each>
  static Lists of(size_t rows, const Each& each) {
    Lists lists(rows);
    each([&](int32_t a, int32_t) { ++lists.first_[a + 1]; });
    for (size_t row = 0; row < rows; ++row) lists.first_[row + 1] += lists.first_[row];
    lists.items_.resize(lists.first_[rows]);
    std::vector<int32_t> next(lists.first_.begin(), lists.first_.end() - 1);
    each([&](int32_t a, int32_t b) { lists.items_[next[a]++] = b; });
    return lists;
  }

 private:
  std::vector<int32_t> first_;
  std::vector<int32_t> items_;
};

// What is looked up of a task over and over, side by side.
struct Task {
  double seconds;
  double transfer[2];
  int32_t source[2];
  int32_t consumers[2];  // on other ranks: what a forward and what a backward hands on
  int32_t num_consumers;
  int32_t rank;
};

class Tasks {
 public:
  explicit Tasks(const PlanTasks& given);

  int32_t num_ranks() const { return given_.num_ranks; }
  int32_t size() const { return given_.num_tasks; }
  int32_t first(int32_t rank) const { return given_.first[rank]; }
  int32_t last(int32_t rank) const { return given_.first[rank + 1]; }
  int32_t rank_of(int32_t task) const { return rows_[task].rank; }
  double seconds(int32_t task) const { return rows_[task].seconds; }
  int32_t source(int32_t task, int part) const { return rows_[task].source[part]; }
  double transfer(int32_t task, int part) const { return rows_[task].transfer[part]; }
  double take(int32_t task) const { return given_.take[task]; }
  double give(int32_t task) const { return given_.give[task]; }
  double limit(int32_t rank) const { return given_.limit[rank]; }
  int32_t next(int32_t task) const { return given_.next[task]; }
  const Lists& before() const { return before_; }  // on the same rank
  const Lists& after() const { return after_; }    // on the same rank
  Span consumers(int32_t task) const {
    return {rows_[task].consumers, rows_[task].consumers + rows_[task].num_consumers};
  }

 private:
  const PlanTasks& given_;
  std::vector<Task> rows_;
  Lists before_;
  Lists after_;
};

// Stale: the positions of an order whose times have to be found anew.

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

// When every task of an order starts and ends: longest ways, without lowering. The times are those of
// fastpipe.simulate with a lane for every channel and receives posted one task ahead. A trial renews what a change
// reaches.

// An order of all tasks, position by position, the ranks one after the other; and where each task stands in it.
struct Order {
  Order(const Tasks& all, const int32_t* order);
  std::vector<int32_t> tasks;
  std::vector<int32_t> place;
};

// The positions of a rank between which its order was changed, both included.
struct Window {
  int32_t rank;
  int32_t low;
  int32_t high;
};

class Retimer {
 public:
  // The order is the caller's, and changes between calls. `span`: what is measured of a rank begins with its own start.
  Retimer(const Tasks& tasks, const Order& order, bool span);

  // Times the whole order; false if it cannot run.
  bool run();
  // Times the order after a change of these positions; `settled` is the old end of the last task that moved. False, and
  // nothing has changed, if it cannot run or its score is above `most`.
  bool attempt(const std::vector<Window>& windows, double settled, double most);
  // Makes the last attempt, at these positions, what holds.
  void keep(const std::vector<Window>& windows);

  double start(int32_t task) const { return starts_[task]; }
  double end(int32_t task) const { return ends_[task]; }
  double objective() const { return objective_; }
  // The objective, and a little of every rank's own measure, so that a plateau has a slope.
  double score() const { return score_; }

  // The longest way from the end of every task to the end of all; a bound of what a delay does.
  void find_tails();
  // The same after a change that was kept, as far as that reaches.
  void renew_tails(const std::vector<Window>& windows);
  // The tasks of the longest way, last to first.
  void find_path(std::vector<int32_t>& path) const;

 private:
  bool sweep();
  void advance(int32_t rank);
  bool waits(int32_t task);
  bool settle(double settled, double most);
  bool renew(int32_t position, int32_t rank, double settled, double most);
  void mark_from(int32_t low, int32_t high, int32_t rank);
  double start_of(int32_t task, int32_t position, int32_t first) const;
  void wake(int32_t task);
  void judge();
  void restore();
  bool retreat(int32_t rank);
  double tail_of(int32_t task) const;
  void renew_tail(int32_t position, int32_t rank);
  void mark_tail(int32_t position, int32_t rank) { stale_tails_.mark(mirrored(position, rank), rank); }
  int32_t mirrored(int32_t position, int32_t rank) const {
    return tasks_.first(rank) + tasks_.last(rank) - 1 - position;
  }
  void set_time(int32_t position, int32_t task);
  int32_t reason(int32_t task) const;
  double measure_base(int32_t rank) const { return span_ ? starts_[order_.tasks[tasks_.first(rank)]] : 0.0; }

  const Tasks& tasks_;
  const Order& order_;
  const bool span_;
  std::vector<double> starts_;
  std::vector<double> ends_;
  std::vector<double> trial_starts_;  // between trials those that hold
  std::vector<double> trial_ends_;
  std::vector<double> tails_;
  Stale stale_;
  Stale stale_tails_;                // the same backwards: of mirrored positions
  double lag_ = 0.0;                 // for so long a rank's are renewed before another's
  bool rings_hide_ = false;          // tasks take no time, so renewing what waits for itself may come to an end
  std::vector<int32_t> changed_;     // tasks that the trial has renewed
  std::vector<int32_t> renewals_;    // by task: how often
  std::vector<int32_t> position_;    // by rank: how far a sweep has come
  std::vector<int32_t> blocked_on_;  // by rank: the task that it waits for
  std::vector<int32_t> ready_;
  double objective_ = 0.0;
  double score_ = 0.0;
  double trial_objective_ = 0.0;
  double trial_score_ = 0.0;
};

// Annealing over orders, led by the critical path: what most changes are tried on.

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
