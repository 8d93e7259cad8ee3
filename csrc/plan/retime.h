// When every task of an order starts and ends: longest ways, without lowering. The times are those of
// fastpipe.simulate with a lane for every channel and receives posted one task ahead. A trial renews what a change
// reaches.
#pragma once

#include <vector>

#include "plan/stale.h"
#include "plan/tasks.h"

namespace fastpipe::plan {

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

}  // namespace fastpipe::plan
