// When the rounds of waves and loops start: fastpipe/schedules/wave_ticks.py and loop_zb.py, sooner, and number by
// number the same.
#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "plan/plan.h"

namespace fastpipe::plan {

namespace {

constexpr int64_t kNever = int64_t{1} << 60;
constexpr int kForward = 0;
constexpr int kInput = 1;
constexpr int kWeight = 2;
constexpr int kNothing = -1;

// The line in which F, I and W wait for a tick.
template <int Size>
class Line {
 public:
  explicit Line(const int32_t* kinds) { std::copy_n(kinds, Size, kinds_.begin()); }

  int next(const std::array<bool, 3>& can) const {
    const auto found = std::find_if(kinds_.begin(), kinds_.end(), [&](int32_t kind) { return can[kind]; });
    return found == kinds_.end() ? kNothing : *found;
  }

  // `kind` has had its turn: it and those before it go to the end.
  void put_behind(int kind) {
    std::rotate(kinds_.begin(), std::find(kinds_.begin(), kinds_.end(), kind) + 1, kinds_.end());
  }

 private:
  std::array<int32_t, Size> kinds_;
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
  Line<3> first(rule);
  Line<3> full(rule + 3);
  const bool rotate = rule[6] != 0;
  const int64_t room = given.limit / 2;
  int64_t tick = 0;
  int64_t last_input = 0;
  for (int64_t w = 0; w < given.count;) {
    const bool free = wave.f - w < room;
    const int64_t at_f = free && wave.has_forward() ? wave.forward_from() : kNever;
    const int64_t at_i = wave.has_input() ? wave.input_from() : kNever;
    const int kind = (free ? first : full).next({at_f <= tick, at_i <= tick, w < wave.i});
    if (kind == kNothing) {
      tick = std::min(at_f, at_i);
    } else if (kind == kWeight) {
      ++w;
    } else {
      if (kind == kInput) last_input = tick;
      wave.start(kind, tick);
    }
    if (kind != kNothing) {
      if (rotate) {
        first.put_behind(kind);
        full = first;
      }
      ++tick;
    }
    if (2 * tick + given.num_ranks - 1 >= cutoff) return 0;
  }
  const int64_t length = std::max(2 * tick + given.num_ranks - 1, 2 * last_input + 2 * given.num_ranks + 1);
  return length < cutoff ? length : 0;
}

int64_t slack(const PlanRounds& given, const int32_t* rule, int64_t cutoff, int64_t* ticks, int32_t* keys) {
  Wave wave(given, ticks, keys);
  Line<2> first(rule);
  Line<2> full(rule + 2);
  const bool rotate = rule[4] != 0;
  int64_t tick = 0;
  int64_t weights = 0;
  while (wave.has_input()) {
    const int64_t waiting = 2 * wave.i - weights;
    const bool free = 2 * (wave.f + 1) - weights <= given.limit;
    const int64_t at_f = free && wave.has_forward() ? wave.forward_from() : kNever;
    const int64_t at_i = wave.input_from();
    const int kind = (free ? first : full).next({at_f <= tick, at_i <= tick, false});
    if (kind != kNothing) {
      wave.start(kind, tick);
      if (rotate) {
        first.put_behind(kind);
        full = first;
      }
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
