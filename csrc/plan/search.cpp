#include "plan/search.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <queue>
#include <utility>
#include <vector>

namespace fastpipe::plan {

namespace {

constexpr double kSlack = 1e-9;     // of sums of bytes or of activations
constexpr int32_t kReach = 24;      // how far a task is looked for that frees memory
constexpr int32_t kHoleReach = 40;  // or that fills a hole
constexpr size_t kMostShifts = 160;
constexpr int32_t kChains = 4;  // of eight, in which other tasks follow
constexpr double kNever = std::numeric_limits<double>::infinity();

// List scheduling by keys, as fastpipe/planner/engine.py does it. Every rank that is free starts the task of the lowest
// key among those that may run, or waits a little for a better one.
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

Search::Search(const Tasks& tasks, const int32_t* order, bool span, uint64_t seed)
    : tasks_(tasks),
      order_(tasks, order),
      retimer_(tasks, order_, span),
      random_(seed),
      level_(tasks.size()),
      window_of_(tasks.num_ranks(), kNobody) {}

bool Search::begin() {
  if (!retimer_.run()) return false;
  for (int32_t rank = 0; rank < tasks_.num_ranks(); ++rank) {
    if (tasks_.first(rank) == tasks_.last(rank)) continue;
    if (overflow({rank, tasks_.first(rank), tasks_.last(rank) - 1}) != kNobody) return false;
  }
  retimer_.find_tails();
  retimer_.find_path(path_);
  best_objective_ = retimer_.objective();
  best_score_ = retimer_.score();
  return true;
}

void Search::improve(int64_t attempts, double hot, double cold) {
  for (int64_t i = 0; i < attempts; ++i) {
    const double heat = hot + (cold - hot) * (static_cast<double>(i) / static_cast<double>(attempts));
    const double draw = random_.unit();
    const double most = retimer_.score() + heat * (draw * draw);
    shifts_.clear();
    forget_windows();
    if (propose() && try_out(most)) {
      accept();
    } else {
      undo();
    }
  }
}

bool Search::propose() {
  if (random_.below(2) == 0) return cross_stretch();
  const int32_t task = chosen_task();
  if (random_.below(4) == 0) return fill_hole(task);
  const int32_t distance = 1 + random_.below(1 << random_.below(4));
  const bool later = random_.below(2) != 0;
  return shift_chain(task, later ? distance : -distance);
}

const std::vector<int32_t>& Search::path() {
  if (path_is_old_) retimer_.find_path(path_);
  path_is_old_ = false;
  return path_;
}

// Puts a task of a stretch of the critical path, on one rank, behind the stretch's last task or in front of its first:
// a change that crosses neither end leaves the path as long as it was.
bool Search::cross_stretch() {
  const std::vector<int32_t>& path = this->path();  // last to first
  const auto size = static_cast<int32_t>(path.size());
  const int32_t at = random_.below(size);
  const int32_t rank = tasks_.rank_of(path[at]);
  const int32_t step = random_.below(4) != 0 ? -1 : 1;
  int32_t end = at;
  while (end + step >= 0 && end + step < size && tasks_.rank_of(path[end + step]) == rank) end += step;
  return end != at && shift_chain(path[at], order_.place[path[end]] - order_.place[path[at]]);
}

// Three of four times on the critical path, where alone a change can make the whole shorter.
int32_t Search::chosen_task() {
  if (random_.below(4) == 0) return random_.below(tasks_.size());
  return path()[random_.below(static_cast<int32_t>(path().size()))];
}

// The same change for those that follow: in the steady state what helps one microbatch helps all, and what goes earlier
// on one rank may have to on the next.
bool Search::shift_chain(int32_t task, int32_t distance) {
  const int32_t way = random_.below(8);
  const int32_t length = way < kChains ? 1 << random_.below(7) : 1;
  int32_t done = 0;
  for (; task != kNobody && done < length && shift_by(task, distance); ++done) task = follower(task, way);
  return done > 0;
}

int32_t Search::follower(int32_t task, int32_t way) const {
  if (way == 0) return tasks_.source(task, 0);
  if (way == 1) {
    const Span consumers = tasks_.consumers(task);
    return consumers.first == consumers.last ? kNobody : *consumers.first;
  }
  return tasks_.next(task);
}

bool Search::shift_by(int32_t task, int32_t distance) {
  const int32_t from = order_.place[task];
  const int32_t to = distance < 0 ? std::max(from + distance, earliest(task)) : std::min(from + distance, latest(task));
  if (to == from) return false;
  put({from, to});
  return true;
}

// Puts a later task in front of one that waits.
bool Search::fill_hole(int32_t task) {
  const int32_t place = order_.place[task];
  const int32_t rank = tasks_.rank_of(task);
  if (place == tasks_.first(rank) || retimer_.start(task) <= retimer_.end(order_.tasks[place - 1])) return false;
  const int32_t last = std::min(tasks_.last(rank) - 1, place + kHoleReach);
  if (last == place) return false;
  for (int32_t i = place + 1 + random_.below(last - place); i <= last; ++i) {
    if (earliest(order_.tasks[i]) <= place) {
      put({i, place});
      return true;
    }
  }
  return false;
}

void Search::put(Shift shift) {
  shifts_.push_back(shift);
  touch(tasks_.rank_of(order_.tasks[shift.from]), std::min(shift.from, shift.to), std::max(shift.from, shift.to));
  rotate(shift);
}

void Search::touch(int32_t rank, int32_t low, int32_t high) {
  if (window_of_[rank] == kNobody) {
    window_of_[rank] = static_cast<int32_t>(windows_.size());
    windows_.push_back({rank, low, high});
  } else {
    Window& window = windows_[window_of_[rank]];
    window.low = std::min(window.low, low);
    window.high = std::max(window.high, high);
  }
}

void Search::forget_windows() {
  for (const Window& window : windows_) window_of_[window.rank] = kNobody;
  windows_.clear();
}

void Search::rotate(Shift shift) {
  const int32_t task = order_.tasks[shift.from];
  const int32_t step = shift.from < shift.to ? 1 : -1;
  for (int32_t i = shift.from; i != shift.to; i += step) {
    order_.tasks[i] = order_.tasks[i + step];
    order_.place[order_.tasks[i]] = i;
  }
  order_.tasks[shift.to] = task;
  order_.place[task] = shift.to;
}

void Search::undo() {
  if (shifts_.empty()) return;
  for (; !shifts_.empty(); shifts_.pop_back()) rotate({shifts_.back().to, shifts_.back().from});
  for (const Window& window : windows_) overflow(window);
}

bool Search::try_out(double most) {
  double settled = 0.0;
  for (const Window& window : windows_) {  // which only grow: what makes room is of the same rank
    for (int32_t full = overflow(window); full != kNobody; full = overflow(window)) {
      if (shifts_.size() >= kMostShifts || !make_room(window.rank, full)) return false;
    }
    for (int32_t i = window.low; i <= window.high; ++i) settled = std::max(settled, retimer_.end(order_.tasks[i]));
  }
  return retimer_.attempt(windows_, settled, most);
}

// The first position of a window where memory does not suffice, or nobody's.
int32_t Search::overflow(const Window& window) {
  const double limit = tasks_.limit(window.rank) + kSlack;
  double held = level_[window.low];
  int32_t found = kNobody;
  for (int32_t i = window.low; i <= window.high; ++i) {
    level_[i] = held;
    held += tasks_.take(order_.tasks[i]);
    if (held > limit && found == kNobody) found = i;
    held -= tasks_.give(order_.tasks[i]);
  }
  return found;
}

// Puts the next task that frees memory, and may, in front of the one that lacks it.
bool Search::make_room(int32_t rank, int32_t position) {
  const int32_t last = std::min(tasks_.last(rank) - 1, position + kReach);
  for (int32_t i = position + 1; i <= last; ++i) {
    const int32_t task = order_.tasks[i];
    if (tasks_.give(task) > 0.0 && earliest(task) <= position) {
      put({i, position});
      return true;
    }
  }
  return false;
}

int32_t Search::earliest(int32_t task) const {
  int32_t place = tasks_.first(tasks_.rank_of(task));
  for (const int32_t other : tasks_.before()[task]) place = std::max(place, order_.place[other] + 1);
  return place;
}

int32_t Search::latest(int32_t task) const {
  int32_t place = tasks_.last(tasks_.rank_of(task)) - 1;
  for (const int32_t other : tasks_.after()[task]) place = std::min(place, order_.place[other] - 1);
  return place;
}

void Search::accept() {
  retimer_.keep(windows_);
  retimer_.renew_tails(windows_);
  path_is_old_ = true;
  if (retimer_.score() < best_score_) {
    best_.clear();
    since_best_.clear();
    best_objective_ = retimer_.objective();
    best_score_ = retimer_.score();
  } else if (best_.empty()) {
    since_best_.insert(since_best_.end(), shifts_.begin(), shifts_.end());
    if (since_best_.size() > order_.tasks.size()) best_ = best();
  }
}

// What led away from the best order is taken back: a copy each time that an order is the best would cost more.
std::vector<int32_t> Search::best() const {
  if (!best_.empty()) return best_;
  std::vector<int32_t> order = order_.tasks;
  const auto at = order.begin();
  for (auto shift = since_best_.rbegin(); shift != since_best_.rend(); ++shift) {
    const int32_t from = shift->to;
    const int32_t to = shift->from;
    if (from < to) std::rotate(at + from, at + from + 1, at + to + 1);
    if (to < from) std::rotate(at + to, at + from, at + from + 1);
  }
  return order;
}

}  // namespace fastpipe::plan

namespace {

// A search with what it reads of; the arrays are the caller's.
struct Begun {
  Begun(const PlanTasks& from, const int32_t* order, bool span, uint64_t seed)
      : given(from), tasks(given), search(tasks, order, span, seed) {}
  const PlanTasks given;
  const fastpipe::plan::Tasks tasks;
  fastpipe::plan::Search search;
};

}  // namespace

extern "C" void* fastpipe_plan_search(const PlanTasks* given, const int32_t* order, int32_t span, uint64_t seed) {
  return fastpipe::plan::guarded<void*>(nullptr, [&] {
    auto begun = std::make_unique<Begun>(*given, order, span != 0, seed);
    return begun->search.begin() ? begun.release() : nullptr;
  });
}

extern "C" int32_t fastpipe_plan_improve(void* begun, int64_t attempts, double hot, double cold) {
  return fastpipe::plan::guarded<int32_t>(0, [&] {
    static_cast<Begun*>(begun)->search.improve(attempts, hot, cold);
    return 1;
  });
}

extern "C" int32_t fastpipe_plan_best(const void* begun, int32_t* order, double* objective) {
  return fastpipe::plan::guarded<int32_t>(0, [&] {
    const fastpipe::plan::Search& search = static_cast<const Begun*>(begun)->search;
    const std::vector<int32_t> best = search.best();
    std::copy(best.begin(), best.end(), order);
    *objective = search.best_objective();
    return 1;
  });
}

extern "C" void fastpipe_plan_end_search(void* begun) {
  delete static_cast<Begun*>(begun);
}

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
