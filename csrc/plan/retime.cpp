#include <algorithm>
#include <functional>
#include <stdexcept>

#include "plan/search.h"

namespace fastpipe::plan {

Tasks::Tasks(const PlanTasks& given) : given_(given), rows_(given.num_tasks) {
  const auto count = static_cast<size_t>(given.num_tasks);
  for (int32_t rank = 0; rank < given.num_ranks; ++rank) {
    for (int32_t task = given.first[rank]; task < given.first[rank + 1]; ++task) {
      Task& row = rows_[task];
      row.rank = rank;
      row.seconds = given.seconds[task];
      std::copy_n(given.transfer + 2 * task, 2, row.transfer);
      std::copy_n(given.source + 2 * task, 2, row.source);
    }
  }
  for (int32_t task = 0; task < given.num_tasks; ++task) {
    for (const int32_t source : rows_[task].source) {
      if (source == kNobody) continue;
      Task& row = rows_[source];
      if (row.num_consumers == 2) throw std::length_error("a task of more than two consumers");
      row.consumers[row.num_consumers++] = task;
    }
  }
  const auto local = [&](const auto& visit) {
    for (int32_t i = 0; i < given.num_local; ++i) visit(given.local[2 * i + 1], given.local[2 * i]);
  };
  const auto reversed = [&](const auto& visit) {
    for (int32_t i = 0; i < given.num_local; ++i) visit(given.local[2 * i], given.local[2 * i + 1]);
  };
  before_ = Lists::of(count, local);
  after_ = Lists::of(count, reversed);
}

namespace {
constexpr double kSlope = 0.1;
constexpr double kTiny = 1e-9;        // of the longest task's seconds: less may be lost when it is added to a time
constexpr int32_t kMostRenewals = 8;  // of a task in a trial: what waits for itself would be renewed for ever
}  // namespace

Order::Order(const Tasks& all, const int32_t* order) : tasks(order, order + all.size()), place(all.size()) {
  for (int32_t i = 0; i < all.size(); ++i) place[tasks[i]] = i;
}

Retimer::Retimer(const Tasks& tasks, const Order& order, bool span)
    : tasks_(tasks),
      order_(order),
      span_(span),
      starts_(tasks.size()),
      ends_(tasks.size()),
      trial_starts_(tasks.size()),
      trial_ends_(tasks.size()),
      tails_(tasks.size(), 0.0),
      stale_(tasks),
      stale_tails_(tasks),
      renewals_(tasks.size()),
      position_(tasks.num_ranks()),
      blocked_on_(tasks.num_ranks()) {
  for (int32_t task = 0; task < tasks.size(); ++task) lag_ = std::max(lag_, tasks.seconds(task));
  for (int32_t task = 0; task < tasks.size(); ++task) {
    const Span consumers = tasks.consumers(task);
    rings_hide_ |= consumers.first != consumers.last && tasks.seconds(task) <= kTiny * lag_;
  }
}

bool Retimer::run() {
  for (int32_t rank = 0; rank < tasks_.num_ranks(); ++rank) {
    for (int32_t i = tasks_.first(rank); i < tasks_.last(rank); ++i) {
      if (tasks_.rank_of(order_.tasks[i]) != rank) return false;
    }
  }
  if (!sweep()) return false;
  judge();
  starts_ = trial_starts_;
  ends_ = trial_ends_;
  objective_ = trial_objective_;
  score_ = trial_score_;
  for (int32_t task = 0; task < tasks_.size(); ++task) set_time(order_.place[task], task);
  return true;
}

void Retimer::set_time(int32_t position, int32_t task) {
  stale_.set_time(position, starts_[task]);
  stale_tails_.set_time(mirrored(position, tasks_.rank_of(task)), -starts_[task]);
}

bool Retimer::sweep() {
  ready_.clear();
  for (int32_t rank = 0; rank < tasks_.num_ranks(); ++rank) {
    position_[rank] = tasks_.first(rank);
    blocked_on_[rank] = kNobody;
    ready_.push_back(rank);
  }
  while (!ready_.empty()) {
    const int32_t rank = ready_.back();
    ready_.pop_back();
    advance(rank);
  }
  for (int32_t rank = 0; rank < tasks_.num_ranks(); ++rank) {
    if (position_[rank] < tasks_.last(rank)) return false;
  }
  return true;
}

void Retimer::advance(int32_t rank) {
  for (int32_t& i = position_[rank]; i < tasks_.last(rank); ++i) {
    const int32_t task = order_.tasks[i];
    if (waits(task)) return;
    trial_starts_[task] = start_of(task, i, tasks_.first(rank));
    trial_ends_[task] = trial_starts_[task] + tasks_.seconds(task);
    wake(task);
  }
}

bool Retimer::waits(int32_t task) {
  for (int part = 0; part < 2; ++part) {
    const int32_t source = tasks_.source(task, part);
    if (source != kNobody && order_.place[source] >= position_[tasks_.rank_of(source)]) {
      blocked_on_[tasks_.rank_of(task)] = source;
      return true;
    }
  }
  return false;
}

bool Retimer::attempt(const std::vector<Window>& windows, double settled, double most) {
  for (const Window& window : windows) mark_from(window.low, window.high + 2, window.rank);
  // A bound of the objective that goes with the bound of the score, as if the slope's part of it stayed.
  if (settle(settled, most - (score_ - objective_)) && (!rings_hide_ || sweep())) {
    judge();
    if (trial_score_ <= most) return true;
  }
  restore();
  return false;
}

// By the time at which the task of a position started before, what a task depends on is settled before it, or nearly:
// what comes after it makes it stale again.
bool Retimer::settle(double settled, double most) {
  for (int32_t rank = stale_.earliest_rank(); rank != kNobody; rank = stale_.earliest_rank()) {
    const double until = stale_.time(rank) + lag_;
    while (stale_.any(rank) && stale_.time(rank) <= until) {
      if (!renew(stale_.take(rank), rank, settled, most)) return false;
    }
  }
  return true;
}

// What started after the change had settled has the tail it had: a delay that reaches it is a delay of the end.
bool Retimer::renew(int32_t position, int32_t rank, double settled, double most) {
  const int32_t task = order_.tasks[position];
  const double start = start_of(task, position, tasks_.first(rank));
  if (start == trial_starts_[task]) return true;
  const double end = start + tasks_.seconds(task);
  if (starts_[task] >= settled && end + tails_[task] > most) return false;
  if (++renewals_[task] > kMostRenewals) return false;
  changed_.push_back(task);
  trial_starts_[task] = start;
  trial_ends_[task] = end;
  mark_from(position + 1, position + 2, rank);
  for (const int32_t consumer : tasks_.consumers(task)) {
    stale_.mark(order_.place[consumer], tasks_.rank_of(consumer));
  }
  return true;
}

void Retimer::mark_from(int32_t low, int32_t high, int32_t rank) {
  const int32_t last = std::min(high, tasks_.last(rank) - 1);
  for (int32_t i = low; i <= last; ++i) stale_.mark(i, rank);
}

void Retimer::restore() {
  for (const int32_t task : changed_) {
    trial_starts_[task] = starts_[task];
    trial_ends_[task] = ends_[task];
    renewals_[task] = 0;
  }
  changed_.clear();
  stale_.clear();
}

void Retimer::keep(const std::vector<Window>& windows) {
  for (const int32_t task : changed_) {
    starts_[task] = trial_starts_[task];
    ends_[task] = trial_ends_[task];
    renewals_[task] = 0;
    set_time(order_.place[task], task);
  }
  for (const Window& window : windows) {
    for (int32_t i = window.low; i <= window.high; ++i) set_time(i, order_.tasks[i]);
  }
  changed_.clear();
  objective_ = trial_objective_;
  score_ = trial_score_;
}

// A receive is posted when the task before the one before has ended, and a transfer starts when both ends are there.
double Retimer::start_of(int32_t task, int32_t position, int32_t first) const {
  double start = position > first ? trial_ends_[order_.tasks[position - 1]] : 0.0;
  for (int part = 0; part < 2; ++part) {
    const int32_t source = tasks_.source(task, part);
    if (source == kNobody) break;
    const double posted = position - first >= 2 ? trial_ends_[order_.tasks[position - 2]] : 0.0;
    start = std::max(start, std::max(trial_ends_[source], posted) + tasks_.transfer(task, part));
  }
  return start;
}

void Retimer::wake(int32_t task) {
  for (const int32_t consumer : tasks_.consumers(task)) {
    const int32_t rank = tasks_.rank_of(consumer);
    if (blocked_on_[rank] == task) {
      blocked_on_[rank] = kNobody;
      ready_.push_back(rank);
    }
  }
}

void Retimer::judge() {
  double worst = 0.0;
  double sum = 0.0;
  for (int32_t rank = 0; rank < tasks_.num_ranks(); ++rank) {
    if (tasks_.first(rank) == tasks_.last(rank)) continue;
    const double begin = span_ ? trial_starts_[order_.tasks[tasks_.first(rank)]] : 0.0;
    const double measure = trial_ends_[order_.tasks[tasks_.last(rank) - 1]] - begin;
    worst = std::max(worst, measure);
    sum += measure;
  }
  const double mean = sum / tasks_.num_ranks();
  trial_objective_ = worst;
  trial_score_ = worst + kSlope * mean;
}

void Retimer::find_tails() {
  ready_.clear();
  for (int32_t rank = 0; rank < tasks_.num_ranks(); ++rank) {
    position_[rank] = tasks_.last(rank) - 1;
    blocked_on_[rank] = kNobody;
    ready_.push_back(rank);
  }
  while (!ready_.empty()) {
    const int32_t rank = ready_.back();
    ready_.pop_back();
    while (position_[rank] >= tasks_.first(rank) && retreat(rank)) --position_[rank];
  }
}

// Finds the tail of the task at the rank's position; false where that of a consumer is not known yet.
bool Retimer::retreat(int32_t rank) {
  const int32_t task = order_.tasks[position_[rank]];
  for (const int32_t consumer : tasks_.consumers(task)) {
    if (order_.place[consumer] <= position_[tasks_.rank_of(consumer)]) {
      blocked_on_[rank] = consumer;
      return false;
    }
  }
  tails_[task] = tail_of(task);
  for (int part = 0; part < 2; ++part) {
    const int32_t source = tasks_.source(task, part);
    if (source == kNobody) break;
    const int32_t other = tasks_.rank_of(source);
    if (blocked_on_[other] == task) {
      blocked_on_[other] = kNobody;
      ready_.push_back(other);
    }
  }
  return true;
}

double Retimer::tail_of(int32_t task) const {
  const int32_t rank = tasks_.rank_of(task);
  const int32_t position = order_.place[task];
  double tail = -measure_base(rank);
  if (position + 1 < tasks_.last(rank)) {
    const int32_t next = order_.tasks[position + 1];
    tail = tasks_.seconds(next) + tails_[next];
  }
  for (const int32_t consumer : tasks_.consumers(task)) {
    const int part = tasks_.source(consumer, 0) == task ? 0 : 1;
    tail = std::max(tail, tasks_.transfer(consumer, part) + tasks_.seconds(consumer) + tails_[consumer]);
  }
  return tail;
}

// Backwards from what moved, the last first or nearly, until nothing differs: the same tails as found from nothing.
void Retimer::renew_tails(const std::vector<Window>& windows) {
  for (const Window& window : windows) {
    const int32_t first = std::max(window.low - 1, tasks_.first(window.rank));
    for (int32_t i = window.high; i >= first; --i) mark_tail(i, window.rank);
  }
  for (int32_t rank = 0; span_ && rank < tasks_.num_ranks(); ++rank) {
    if (tasks_.first(rank) < tasks_.last(rank)) mark_tail(tasks_.last(rank) - 1, rank);
  }
  for (int32_t rank = stale_tails_.earliest_rank(); rank != kNobody; rank = stale_tails_.earliest_rank()) {
    const double until = stale_tails_.time(rank) + lag_;
    while (stale_tails_.any(rank) && stale_tails_.time(rank) <= until) {
      renew_tail(mirrored(stale_tails_.take(rank), rank), rank);
    }
  }
}

void Retimer::renew_tail(int32_t position, int32_t rank) {
  const int32_t task = order_.tasks[position];
  const double tail = tail_of(task);
  if (tail == tails_[task]) return;
  tails_[task] = tail;
  if (position > tasks_.first(rank)) mark_tail(position - 1, rank);
  for (int part = 0; part < 2; ++part) {
    const int32_t source = tasks_.source(task, part);
    if (source == kNobody) break;
    mark_tail(order_.place[source], tasks_.rank_of(source));
  }
}

void Retimer::find_path(std::vector<int32_t>& path) const {
  path.clear();
  int32_t task = kNobody;
  double worst = -1.0;
  for (int32_t rank = 0; rank < tasks_.num_ranks(); ++rank) {
    if (tasks_.first(rank) == tasks_.last(rank)) continue;
    const int32_t end = order_.tasks[tasks_.last(rank) - 1];
    const double measure = ends_[end] - measure_base(rank);
    if (measure > worst) {
      worst = measure;
      task = end;
    }
  }
  for (; task != kNobody; task = reason(task)) path.push_back(task);
}

// What the task waited for last: the task before it on its rank, a message, or the room for one.
int32_t Retimer::reason(int32_t task) const {
  const int32_t position = order_.place[task];
  const int32_t first = tasks_.first(tasks_.rank_of(task));
  const double start = starts_[task];
  if (position > first && ends_[order_.tasks[position - 1]] == start) return order_.tasks[position - 1];
  for (int part = 0; part < 2; ++part) {
    const int32_t source = tasks_.source(task, part);
    if (source != kNobody && ends_[source] + tasks_.transfer(task, part) == start) return source;
  }
  return position - first >= 2 && start > 0.0 ? order_.tasks[position - 2] : kNobody;
}

}  // namespace fastpipe::plan

extern "C" int32_t fastpipe_plan_retime(const PlanTasks* given, const int32_t* order, double* starts, double* ends) {
  return fastpipe::plan::guarded<int32_t>(0, [&] {
    const fastpipe::plan::Tasks tasks(*given);
    const fastpipe::plan::Order as_given(tasks, order);
    fastpipe::plan::Retimer retimer(tasks, as_given, false);
    if (!retimer.run()) return 0;
    for (int32_t task = 0; task < tasks.size(); ++task) {
      starts[task] = retimer.start(task);
      ends[task] = retimer.end(task);
    }
    return 1;
  });
}
