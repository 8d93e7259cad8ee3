// List scheduling by keys, as fastpipe/planner/engine.py does it. Every rank that is free starts the task of the
// lowest key among those that may run, or waits a little for a better one.
#include <algorithm>
#include <limits>
#include <queue>
#include <utility>
#include <vector>

#include "plan/search.h"

namespace fastpipe::plan {

namespace {

constexpr double kSlack = 1e-9;
constexpr double kNever = std::numeric_limits<double>::infinity();

class Constructor {
 public:
  Constructor(const Tasks& tasks, const double* key, const double* reserve, double patience)
      : tasks_(tasks),
        key_(key),
        reserve_(reserve),
        patience_(patience),
        ends_(tasks.size(), -1.0),
        heads_(tasks.num_ranks()),
        clock_(tasks.num_ranks(), 0.0),
        held_(tasks.num_ranks(), 0.0),
        written_(tasks.num_ranks()) {}

  bool run(int32_t* order) {
    find_heads();
    for (int32_t rank = 0; rank < tasks_.num_ranks(); ++rank) {
      written_[rank] = tasks_.first(rank);
      events_.emplace(0.0, rank);
    }
    while (!events_.empty()) {
      const auto [now, rank] = events_.top();
      events_.pop();
      if (clock_[rank] <= now) decide(now, rank, order);
    }
    for (int32_t rank = 0; rank < tasks_.num_ranks(); ++rank) {
      if (written_[rank] < tasks_.last(rank)) return false;
    }
    return true;
  }

 private:
  using Event = std::pair<double, int32_t>;

  void find_heads() {
    std::vector<bool> follows(tasks_.size(), false);
    for (int32_t task = 0; task < tasks_.size(); ++task) {
      if (tasks_.next(task) != kNobody) follows[tasks_.next(task)] = true;
    }
    for (int32_t task = 0; task < tasks_.size(); ++task) {
      if (!follows[task]) heads_[tasks_.rank_of(task)].push_back(task);
    }
  }

  void decide(double now, int32_t rank, int32_t* order) {
    int32_t best = -1;
    int32_t soon = -1;
    double soon_arrival = kNever;
    std::vector<int32_t>& heads = heads_[rank];
    for (int32_t line = 0; line < static_cast<int32_t>(heads.size()); ++line) {
      const int32_t task = heads[line];
      if (task == kNobody || !may_run(task, rank)) continue;
      const double arrival = arrival_of(task);
      if (arrival <= now) {
        if (best < 0 || key_[task] < key_[heads[best]]) best = line;
      } else if (arrival < kNever && (soon < 0 || key_[task] < key_[heads[soon]])) {
        soon = line;
        soon_arrival = arrival;
      }
    }
    if (best < 0) return;
    const double wait = patience_ * tasks_.seconds(heads[best]);
    if (soon >= 0 && key_[heads[soon]] < key_[heads[best]] && soon_arrival <= now + wait) return;
    begin(now, rank, heads[best], order);
    heads[best] = tasks_.next(heads[best]);
  }

  bool may_run(int32_t task, int32_t rank) const {
    if (ends_[task] >= 0.0) return false;  // a fused pair stands in two lines
    const double take = tasks_.take(task);
    if (take > 0.0 && held_[rank] + take + reserve_[task] > tasks_.limit(rank) + kSlack) return false;
    const Span before = tasks_.before()[task];
    return std::all_of(before.begin(), before.end(), [&](int32_t other) { return ends_[other] >= 0.0; });
  }

  double arrival_of(int32_t task) const {
    double arrival = 0.0;
    for (int part = 0; part < 2; ++part) {
      const int32_t source = tasks_.source(task, part);
      if (source == kNobody) break;
      if (ends_[source] < 0.0) return kNever;
      arrival = std::max(arrival, ends_[source] + tasks_.transfer(task, part));
    }
    return arrival;
  }

  void begin(double now, int32_t rank, int32_t task, int32_t* order) {
    const double end = now + tasks_.seconds(task);
    ends_[task] = clock_[rank] = end;
    held_[rank] = held_[rank] + tasks_.take(task) - tasks_.give(task);
    order[written_[rank]++] = task;
    events_.emplace(end, rank);
    for (const int32_t other : tasks_.consumers(task)) {
      const double arrival = arrival_of(other);
      if (arrival < kNever) events_.emplace(arrival, tasks_.rank_of(other));
    }
  }

  const Tasks& tasks_;
  const double* const key_;
  const double* const reserve_;
  const double patience_;
  std::vector<double> ends_;
  std::vector<std::vector<int32_t>> heads_;  // by rank: the next task of every line, or nobody
  std::vector<double> clock_;
  std::vector<double> held_;
  std::vector<int32_t> written_;
  std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events_;
};

}  // namespace

}  // namespace fastpipe::plan

extern "C" int32_t fastpipe_plan_construct(const PlanTasks* given, int32_t span, int32_t count, const double* keys,
                                           const double* reserves, const double* patience, int32_t* orders,
                                           double* objectives) {
  return fastpipe::plan::guarded<int32_t>(0, [&] {
    const fastpipe::plan::Tasks tasks(*given);
    for (int32_t i = 0; i < count; ++i) {
      const int64_t row = int64_t{i} * tasks.size();
      objectives[i] = std::numeric_limits<double>::infinity();
      if (!fastpipe::plan::Constructor(tasks, keys + row, reserves + row, patience[i]).run(orders + row)) continue;
      const fastpipe::plan::Order order(tasks, orders + row);
      fastpipe::plan::Retimer retimer(tasks, order, span != 0);
      if (retimer.run()) objectives[i] = retimer.objective();
    }
    return 1;
  });
}
