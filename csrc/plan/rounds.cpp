// Rounds of waves and loops, as fastpipe/schedules does them, sooner, and number by number the same: when they start,
// the W that go with them, and how long all of it takes.
#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <tuple>
#include <vector>

#include "plan/orders.h"

namespace fastpipe::plan {

namespace {

// --- one tick after the other: wave_ticks.py and loop_zb.py ---------------------------------------------------------

constexpr int64_t kNever = int64_t{1} << 60;
constexpr int kForward = 0;
constexpr int kInput = 1;
constexpr int kWeight = 2;
constexpr int kNothing = -1;

// The lines in which F, I and W wait for a tick: one while memory is free, one while it is full.
template <int Size>
class Lines {
 public:
  explicit Lines(const int32_t* rule) : rotate_(rule[2 * Size] != 0) {
    std::copy_n(rule, Size, free_.begin());
    std::copy_n(rule + Size, Size, full_.begin());
  }

  int next(bool free, const std::array<bool, 3>& can) const {
    const auto& kinds = free ? free_ : full_;
    const auto found = std::find_if(kinds.begin(), kinds.end(), [&](int32_t kind) { return can[kind]; });
    return found == kinds.end() ? kNothing : *found;
  }

  // `kind` has had its turn: by some rules it and those before it go to the end.
  void had_turn(int kind) {
    if (!rotate_) return;
    std::rotate(free_.begin(), std::find(free_.begin(), free_.end(), kind) + 1, free_.end());
    full_ = free_;
  }

 private:
  std::array<int32_t, Size> free_;
  std::array<int32_t, Size> full_;
  bool rotate_;
};

// From which tick on every round can start; what has started, in order.
class Wave {
 public:
  Wave(const PlanRounds& given, int64_t* ticks, int32_t* keys)
      : given_(given), ready_(given.num_keys + given.num_microbatches, kNever), ticks_(ticks), keys_(keys) {
    std::fill_n(ready_.begin(), given.num_microbatches, 0);
  }

  bool has_forward() const { return f < given_.count; }
  bool has_input() const { return i < given_.count; }
  int64_t forward_from() const { return ready_[given_.forward[f]]; }
  int64_t input_from() const { return ready_[given_.backward[i]]; }

  void start(int kind, int64_t tick) {
    const int32_t key = kind == kForward ? given_.forward[f++] : given_.backward[i++];
    ticks_[f + i - 1] = tick;
    keys_[f + i - 1] = key;
    ready_[key + given_.num_microbatches] = tick + given_.num_ranks;
  }

  int64_t f = 0;
  int64_t i = 0;

 private:
  const PlanRounds& given_;
  std::vector<int64_t> ready_;
  int64_t* const ticks_;
  int32_t* const keys_;
};

int64_t compact(const PlanRounds& given, const int32_t* rule, int64_t cutoff, int64_t* ticks, int32_t* keys) {
  Wave wave(given, ticks, keys);
  Lines<3> lines(rule);
  const int64_t room = given.limit / 2;
  int64_t tick = 0;
  int64_t last_input = 0;
  for (int64_t w = 0; w < given.count;) {
    const bool free = wave.f - w < room;
    const int64_t at_f = free && wave.has_forward() ? wave.forward_from() : kNever;
    const int64_t at_i = wave.has_input() ? wave.input_from() : kNever;
    const int kind = lines.next(free, {at_f <= tick, at_i <= tick, w < wave.i});
    if (kind == kNothing) {
      tick = std::min(at_f, at_i);
    } else if (kind == kWeight) {
      ++w;
    } else {
      if (kind == kInput) last_input = tick;
      wave.start(kind, tick);
    }
    if (kind != kNothing) {
      lines.had_turn(kind);
      ++tick;
    }
    if (2 * tick + given.num_ranks - 1 >= cutoff) return 0;
  }
  const int64_t length = std::max(2 * tick + given.num_ranks - 1, 2 * last_input + 2 * given.num_ranks + 1);
  return length < cutoff ? length : 0;
}

int64_t slack(const PlanRounds& given, const int32_t* rule, int64_t cutoff, int64_t* ticks, int32_t* keys) {
  Wave wave(given, ticks, keys);
  Lines<2> lines(rule);
  int64_t tick = 0;
  int64_t weights = 0;
  while (wave.has_input()) {
    const int64_t waiting = 2 * wave.i - weights;
    const bool free = 2 * (wave.f + 1) - weights <= given.limit;
    const int64_t at_f = free && wave.has_forward() ? wave.forward_from() : kNever;
    const int64_t at_i = wave.input_from();
    const int kind = lines.next(free, {at_f <= tick, at_i <= tick, false});
    if (kind != kNothing) {
      wave.start(kind, tick);
      lines.had_turn(kind);
    } else if (waiting == 0 && std::min(at_f, at_i) == kNever) {
      return 0;
    }
    weights += std::min<int64_t>(waiting, kind == kNothing ? 3 : 1);
    ++tick;
    if (3 * (tick + given.num_ranks) >= cutoff) return 0;
  }
  return 3 * (tick + given.num_ranks);
}

// Slot by slot: a round of F where there is memory for it, a round of I where there is one to start.
class Loop {
 public:
  Loop(const PlanRounds& given, int64_t* forward, int64_t* backward)
      : given_(given), ready_(given.num_keys + given.num_microbatches, kNever), forward_(forward), backward_(backward) {
    std::fill_n(ready_.begin(), given.num_microbatches, 0);
  }

  int64_t run(int64_t cutoff) {
    const int64_t lane = given_.num_ranks % 2;
    int64_t slot = 0;
    while (weights_ < given_.count) {
      if (slot % 2 == lane) start(slot, given_.backward, backward_, i_);
      if (slot % 2 == 0) {
        if (f_ - weights_ >= given_.limit || !start(slot, given_.forward, forward_, f_)) weight();
      } else if (arrived_ < i_ && backward_[arrived_] + given_.num_ranks - 1 == slot) {
        ++arrived_;
      } else {
        weight();
      }
      ++slot;
      if (slot >= cutoff || stuck()) return 0;
    }
    return slot;
  }

 private:
  bool start(int64_t slot, const int32_t* keys, int64_t* slots, int64_t& started) {
    if (started == given_.count || ready_[keys[started]] > slot) return false;
    ready_[keys[started] + given_.num_microbatches] = slot + given_.num_ranks;
    slots[started++] = slot;
    return true;
  }

  void weight() { weights_ += weights_ < arrived_ ? 1 : 0; }

  bool stuck() const {
    const bool full = f_ == given_.count || f_ - weights_ >= given_.limit || ready_[given_.forward[f_]] == kNever;
    const bool idle = i_ == given_.count || ready_[given_.backward[i_]] == kNever;
    return full && idle && weights_ == i_ && i_ < given_.count;
  }

  const PlanRounds& given_;
  std::vector<int64_t> ready_;
  int64_t* const forward_;
  int64_t* const backward_;
  int64_t f_ = 0;
  int64_t i_ = 0;
  int64_t arrived_ = 0;
  int64_t weights_ = 0;
};

// --- a compact wave by beam search: wave_ticks.py -------------------------------------------------------------------

constexpr int32_t kMaxDuplicates = 3;

// One thing that a tick could be given to: a round, the W of one (`kinds`), or nothing (`kinds` + 1).
struct Choice {
  int64_t score;
  int32_t idle;
  int32_t from;  // the beginning that goes on
  int32_t kind;
  bool operator<(const Choice& other) const {
    return std::tie(other.score, idle, from, kind) < std::tie(score, other.idle, other.from, other.kind);
  }
};

// The beginnings of a tick, each in one row: what has started of every kind, W, what has ended, what is running.
class Beginnings {
 public:
  Beginnings(int32_t kinds, int32_t ranks) : kinds_(kinds), size_(2 * kinds + 1 + ranks), ranks_(ranks) {}

  void clear() {
    rows_.clear();
    choices_.clear();
  }
  int32_t count() const { return static_cast<int32_t>(choices_.size()); }
  void add_empty() {
    choices_.push_back({0, 0, kNone, kNone});
    rows_.assign(size_, 0);
    std::fill_n(running(0), ranks_, kNone);
  }
  void add(const Beginnings& others, const Choice& choice, int32_t slot) {
    const int32_t* from = others.rows_.data() + static_cast<size_t>(choice.from) * size_;
    rows_.insert(rows_.end(), from, from + size_);
    choices_.push_back(choice);
    if (choice.kind <= kinds_) ++started(count() - 1)[choice.kind];
    running(count() - 1)[slot] = choice.kind < kinds_ ? choice.kind : kNone;
  }
  void drop_last() {
    rows_.resize(rows_.size() - size_);
    choices_.pop_back();
  }
  int32_t* started(int32_t row) { return rows_.data() + static_cast<size_t>(row) * size_; }
  int32_t weights(int32_t row) { return started(row)[kinds_]; }
  int32_t* ended(int32_t row) { return started(row) + kinds_ + 1; }
  int32_t* running(int32_t row) { return ended(row) + kinds_; }
  const std::vector<Choice>& choices() const { return choices_; }

  bool has_started_the_same(int32_t row, int32_t other) {
    return std::equal(started(row), started(row) + kinds_ + 1, started(other));
  }
  bool runs_the_same(int32_t row, int32_t other) {
    return std::equal(running(row), running(row) + ranks_, running(other));
  }

 private:
  int32_t kinds_;
  size_t size_;
  int32_t ranks_;
  std::vector<int32_t> rows_;
  std::vector<Choice> choices_;
};

class Beam {
 public:
  Beam(const PlanBeam& given, int64_t length)
      : given_(given),
        kinds_(2 * given.num_rounds),
        count_(int64_t{given.num_rounds} * given.num_microbatches),
        ticks_((length - given.num_ranks + 1) / 2),
        last_input_(length < 2 * given.num_ranks + 1 ? kNone : (length - 2 * given.num_ranks - 1) / 2),
        spare_(ticks_ - 3 * count_),
        alive_(kinds_, given.num_ranks),
        next_(kinds_, given.num_ranks) {}

  // The ticks that the starts take, 0 where none were found.
  int64_t run(int64_t& budget, int64_t* ticks, int32_t* keys) {
    alive_.add_empty();
    for (int64_t tick = 0; spare_ >= 0 && tick < ticks_; ++tick) {
      choices_.clear();
      for (int32_t row = 0; row < alive_.count(); ++row) choose(row, tick);
      budget -= static_cast<int64_t>(choices_.size());
      if (budget < 0 || choices_.empty()) break;
      std::sort(choices_.begin(), choices_.end());
      const int32_t done = keep_best(static_cast<int32_t>(tick % given_.num_ranks));
      trail_.push_back(alive_.choices());
      if (done != kNone) return write(done, ticks, keys);
    }
    budget = std::max<int64_t>(0, budget);
    return 0;
  }

 private:
  int64_t worth(int32_t kind) const { return kind >= given_.num_rounds && kind < kinds_ ? kind + 1 : 0; }

  void choose(int32_t row, int64_t tick) {
    const int32_t over = alive_.running(row)[tick % given_.num_ranks];
    if (over != kNone) ++alive_.ended(row)[over];
    const int32_t* started = alive_.started(row);
    const int32_t* ended = alive_.ended(row);
    const Choice& so_far = alive_.choices()[row];
    int64_t forwards = 0;
    int64_t inputs = 0;
    for (int32_t kind = 0; kind < kinds_; ++kind) (kind < given_.num_rounds ? forwards : inputs) += started[kind];
    const bool free = forwards - alive_.weights(row) < given_.limit / 2;
    for (int32_t kind = 0; kind < kinds_; ++kind) {
      const int32_t before = kind == 0 ? given_.num_microbatches : ended[kind - 1];
      const bool allowed = kind < given_.num_rounds ? free : tick <= last_input_;
      if (allowed && started[kind] < before) choices_.push_back({so_far.score + worth(kind), so_far.idle, row, kind});
    }
    if (alive_.weights(row) < inputs) choices_.push_back({so_far.score, so_far.idle, row, kinds_});
    if (so_far.idle < spare_) choices_.push_back({so_far.score, so_far.idle + 1, row, kinds_ + 1});
  }

  // The first that is complete, or none.
  int32_t keep_best(int32_t slot) {
    next_.clear();
    for (const Choice& choice : choices_) {
      next_.add(alive_, choice, slot);
      if (is_one_too_many()) next_.drop_last();
      if (next_.count() == given_.width) break;
    }
    std::swap(alive_, next_);
    for (int32_t row = 0; row < alive_.count(); ++row) {
      if (alive_.weights(row) == count_) return row;
    }
    return kNone;
  }

  // Whether the last one is like others that are kept. Those have its score and its empty ticks, so they come just
  // before it.
  bool is_one_too_many() {
    const std::vector<Choice>& kept = next_.choices();
    const int32_t last = next_.count() - 1;
    int32_t duplicates = 0;
    for (int32_t row = last - 1; row >= 0; --row) {
      if (kept[row].score != kept[last].score || kept[row].idle != kept[last].idle) return false;
      if (!next_.has_started_the_same(row, last)) continue;
      if (++duplicates == kMaxDuplicates || next_.runs_the_same(row, last)) return true;
    }
    return false;
  }

  int64_t write(int32_t row, int64_t* ticks, int32_t* keys) const {
    std::vector<int32_t> chosen(trail_.size());
    for (size_t tick = trail_.size(); tick-- > 0; row = trail_[tick][row].from) chosen[tick] = trail_[tick][row].kind;
    std::vector<int32_t> number(kinds_, 0);
    int64_t written = 0;
    for (size_t tick = 0; tick < chosen.size(); ++tick) {
      const int32_t kind = chosen[tick];
      if (kind >= kinds_) continue;
      ticks[written] = static_cast<int64_t>(tick);
      keys[written++] = kind * given_.num_microbatches + number[kind]++;
    }
    return static_cast<int64_t>(chosen.size());
  }

  const PlanBeam& given_;
  const int32_t kinds_;
  const int64_t count_;  // rounds of F, of I, and their W
  const int64_t ticks_;
  const int64_t last_input_;
  const int64_t spare_;  // ticks that may stay empty
  Beginnings alive_;
  Beginnings next_;
  std::vector<Choice> choices_;
  std::vector<std::vector<Choice>> trail_;
};

// --- W, and times: rounds.py ----------------------------------------------------------------------------------------

struct Step {
  int64_t slot;
  int32_t kind;
  int32_t stage;
  int32_t microbatch;
};

// One rank's F and I with its W: the oldest, in free slots, or before an F past the limit. Empty where there is none
// that could release an activation.
std::vector<Step> fill(const PlanSteps& given, int64_t first, int64_t last) {
  std::vector<Step> filled;
  std::vector<Step> waiting;
  filled.reserve((last - first) * 3 / 2);
  size_t done = 0;
  int64_t live = 0;
  int64_t clock = first < last ? given.slot[first] : 0;
  for (int64_t i = first; i < last; ++i) {
    const Step step{given.slot[i], given.kind[i], given.stage[i], given.microbatch[i]};
    const bool forward = step.kind == kF;
    while (done < waiting.size() && (clock < step.slot || (forward && live >= given.limit))) {
      filled.push_back({clock++, kW, waiting[done].stage, waiting[done].microbatch});
      ++done;
      --live;
    }
    if (forward && live >= given.limit) return {};
    filled.push_back(step);
    clock = std::max(clock, step.slot) + 1;
    if (forward) {
      ++live;
    } else {
      waiting.push_back(step);
    }
  }
  for (; done < waiting.size(); ++done) filled.push_back({clock++, kW, waiting[done].stage, waiting[done].microbatch});
  return filled;
}

struct Place {
  int64_t slot;
  int32_t rank;
  int64_t place;
  bool operator<(const Place& other) const {
    return std::tie(slot, rank, place) < std::tie(other.slot, other.rank, other.place);
  }
};

// All steps so that inputs come before what needs them. A W that was forced before an F may have moved the slots of its
// rank: what counts there is the slot that the step had, or the one of the step behind it.
std::vector<Place> in_slot_order(const std::vector<std::vector<Step>>& ranks) {
  std::vector<Place> places;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    int64_t behind = std::numeric_limits<int64_t>::max();
    for (int64_t place = static_cast<int64_t>(ranks[rank].size()) - 1; place >= 0; --place) {
      behind = std::min(behind, ranks[rank][place].slot);
      places.push_back({behind, static_cast<int32_t>(rank), place});
    }
  }
  std::sort(places.begin(), places.end());
  return places;
}

double makespan(const PlanSteps& given, const std::vector<std::vector<Step>>& ranks) {
  const size_t m = given.num_microbatches;
  std::vector<double> clock(given.num_ranks, 0.0);
  std::vector<double> forward(given.num_stages * m, 0.0);  // when an input is there
  std::vector<double> backward(given.num_stages * m, 0.0);
  for (const Place& at : in_slot_order(ranks)) {
    const Step& step = ranks[at.rank][at.place];
    if (step.kind == kW) {
      clock[at.rank] += given.backward_weight;
      continue;
    }
    const bool is_forward = step.kind == kF;
    const size_t pair = step.stage * m + step.microbatch;
    const double start = std::max(clock[at.rank], is_forward ? forward[pair] : backward[pair]);
    const double end = start + (is_forward ? given.forward : given.backward_input);
    clock[at.rank] = end;
    const int32_t after = is_forward ? step.stage + 1 : step.stage - 1;
    if (after == given.num_stages) {
      backward[pair] = end;
    } else if (after >= 0) {
      const double hop = given.route[after] != at.rank ? given.comm : 0.0;
      (is_forward ? forward : backward)[after * m + step.microbatch] = end + hop;
    }
  }
  return *std::max_element(clock.begin(), clock.end());
}

bool is_in_range(const PlanSteps& given) {
  for (int64_t i = 0; i < given.first[given.num_ranks]; ++i) {
    if (given.kind[i] != kF && given.kind[i] != kI) return false;
    if (given.stage[i] < 0 || given.stage[i] >= given.num_stages) return false;
    if (given.microbatch[i] < 0 || given.microbatch[i] >= given.num_microbatches) return false;
  }
  return true;
}

int32_t fill_all(const PlanSteps& given, int32_t* rows, double* makespan_of) {
  if (!is_in_range(given)) return -1;
  const int64_t count = given.first[given.num_ranks] * 3 / 2;
  std::vector<std::vector<Step>> ranks;
  int64_t written = 0;
  for (int32_t rank = 0; rank < given.num_ranks; ++rank) {
    const int64_t steps = given.first[rank + 1] - given.first[rank];
    ranks.push_back(fill(given, given.first[rank], given.first[rank + 1]));
    if (static_cast<int64_t>(ranks.back().size()) != steps * 3 / 2) return ranks.back().empty() ? 0 : -1;
    for (const Step& step : ranks.back()) {
      rows[written] = step.kind;
      rows[count + written] = step.stage;
      rows[2 * count + written] = step.microbatch;
      ++written;
    }
  }
  *makespan_of = makespan(given, ranks);
  return 1;
}

}  // namespace

}  // namespace fastpipe::plan

extern "C" int64_t fastpipe_plan_compact(const PlanRounds* given, const int32_t* rule, int64_t cutoff, int64_t* ticks,
                                         int32_t* keys) {
  return fastpipe::plan::guarded<int64_t>(-1,
                                          [&] { return fastpipe::plan::compact(*given, rule, cutoff, ticks, keys); });
}

extern "C" int64_t fastpipe_plan_slack(const PlanRounds* given, const int32_t* rule, int64_t cutoff, int64_t* ticks,
                                       int32_t* keys) {
  return fastpipe::plan::guarded<int64_t>(-1, [&] { return fastpipe::plan::slack(*given, rule, cutoff, ticks, keys); });
}

extern "C" int64_t fastpipe_plan_loop(const PlanRounds* given, int64_t cutoff, int64_t* forward, int64_t* backward) {
  return fastpipe::plan::guarded<int64_t>(-1,
                                          [&] { return fastpipe::plan::Loop(*given, forward, backward).run(cutoff); });
}

extern "C" int64_t fastpipe_plan_beam(const PlanBeam* given, int64_t length, int64_t* budget, int64_t* ticks,
                                      int32_t* keys) {
  return fastpipe::plan::guarded<int64_t>(
      -1, [&] { return fastpipe::plan::Beam(*given, length).run(*budget, ticks, keys); });
}

extern "C" int32_t fastpipe_plan_fill(const PlanSteps* steps, int32_t* rows, double* makespan) {
  return fastpipe::plan::guarded<int32_t>(-1, [&] { return fastpipe::plan::fill_all(*steps, rows, makespan); });
}
