// Is a schedule complete, and can it run? The meaning is that of fastpipe/validate.py and fastpipe/dependencies.py.
#include <algorithm>
#include <exception>
#include <vector>

#include "plan/orders.h"

namespace fastpipe::plan {
namespace {

// What is known of a (stage, microbatch): which kinds there are (bit = kind), and which events have happened.
constexpr uint8_t kForwardDone = 1 << 4;
constexpr uint8_t kBackwardDone = 1 << 5;

class ScheduleCheck {
 public:
  explicit ScheduleCheck(const PlanOrders& given) : orders_(given) {}

  bool run() {
    // fewer actions than pairs cannot be complete; it also bounds what is allocated
    if (orders_.num_pairs() > orders_.num_entries() * 2) return false;
    state_.assign(orders_.num_pairs(), 0);
    for (int32_t rank = 0; rank < orders_.num_ranks(); ++rank) {
      if (!collect(rank)) return false;
    }
    return complete() && can_run();
  }

 private:
  bool collect(int32_t rank) {
    const Rows rows = orders_.rows(rank);
    std::vector<int32_t> reduced;
    for (int64_t i = 0; i < rows.size(); ++i) {
      if (!well_formed(rows, i, rank) || !keeps_reduced(rows, i, reduced)) return false;
      for (const Part& part : rows.parts(i)) {
        if (!note(part, rank)) return false;
      }
      has_backward_ |= rows.op(i) >= kB && rows.op(i) <= kOverlap;
    }
    return true;
  }

  bool well_formed(const Rows& rows, int64_t i, int32_t rank) const {
    const int32_t op = rows.op(i);
    if (op < kF || op > kReduceGrad) return false;
    if (op == kOverlap) return true;
    if (rows.pair_stage(i) != kNone || rows.pair_microbatch(i) != kNone) return false;
    return op < kUnshard || (rows.microbatch(i) == kNone && orders_.holds(rank, rows.stage(i)));
  }

  // A REDUCE_GRAD comes once, after its stage's last backward.
  static bool keeps_reduced(const Rows& rows, int64_t i, std::vector<int32_t>& reduced) {
    const auto is_reduced = [&](int32_t stage) {
      return std::find(reduced.begin(), reduced.end(), stage) != reduced.end();
    };
    for (const Part& part : rows.parts(i)) {
      if (part.kind != kF && is_reduced(part.stage)) return false;
    }
    if (rows.op(i) != kReduceGrad) return true;
    if (is_reduced(rows.stage(i))) return false;
    reduced.push_back(rows.stage(i));
    return true;
  }

  bool note(const Part& part, int32_t rank) {
    if (!orders_.in_range(part.stage, part.microbatch)) return false;
    if (orders_.owner(part.stage, part.microbatch) != rank) return false;
    uint8_t& state = state_[orders_.pair(part.stage, part.microbatch)];
    const uint8_t bit = static_cast<uint8_t>(1 << part.kind);
    if (state & bit) return false;
    state |= bit;
    return true;
  }

  bool complete() const {
    constexpr uint8_t forward = 1 << kF, whole = forward | 1 << kB, split = forward | 1 << kI | 1 << kW;
    for (const uint8_t state : state_) {
      if (state != split && state != (has_backward_ ? whole : forward)) return false;
    }
    return true;
  }

  // Every rank as far as it comes; an event wakes the one rank that can be waiting for it.
  bool can_run() {
    position_.assign(orders_.num_ranks(), 0);
    waits_for_.assign(orders_.num_ranks(), kNone);
    for (int32_t rank = 0; rank < orders_.num_ranks(); ++rank) ready_.push_back(rank);
    int64_t finished = 0;
    while (!ready_.empty()) {
      const int32_t rank = ready_.back();
      ready_.pop_back();
      finished += advance(rank);
    }
    return finished == orders_.num_ranks();
  }

  bool advance(int32_t rank) {
    const Rows rows = orders_.rows(rank);
    for (int64_t& i = position_[rank]; i < rows.size(); ++i) {
      const Parts parts = rows.parts(i);
      for (const Part& part : parts) {
        if (!may_start(part, rank)) return false;
      }
      for (const Part& part : parts) finish(part);
    }
    return true;
  }

  bool may_start(const Part& part, int32_t rank) {
    if (part.kind == kF) return part.stage == 0 || happened(kForwardDone, part.stage - 1, part.microbatch, rank);
    if (part.kind == kW) return happened(kBackwardDone, part.stage, part.microbatch, rank);
    return happened(kForwardDone, part.stage, part.microbatch, rank) &&
           (part.stage + 1 == orders_.num_stages() || happened(kBackwardDone, part.stage + 1, part.microbatch, rank));
  }

  bool happened(uint8_t event, int32_t stage, int32_t microbatch, int32_t rank) {
    const int64_t pair = orders_.pair(stage, microbatch);
    if (state_[pair] & event) return true;
    waits_for_[rank] = 2 * pair + (event == kBackwardDone);
    return false;
  }

  void finish(const Part& part) {
    if (part.kind == kW) return;
    const int64_t pair = orders_.pair(part.stage, part.microbatch);
    state_[pair] |= part.kind == kF ? kForwardDone : kBackwardDone;
    const int32_t target = orders_.target(part);
    if (target == kNone) return;
    const int32_t rank = orders_.owner(target, part.microbatch);
    if (waits_for_[rank] != 2 * pair + (part.kind != kF)) return;
    waits_for_[rank] = kNone;
    ready_.push_back(rank);
  }

  const Orders orders_;
  bool has_backward_ = false;
  std::vector<uint8_t> state_;
  std::vector<int64_t> position_;
  std::vector<int64_t> waits_for_;
  std::vector<int32_t> ready_;
};

}  // namespace
}  // namespace fastpipe::plan

extern "C" int32_t fastpipe_plan_validate_schedule(const PlanOrders* orders) {
  try {
    return fastpipe::plan::ScheduleCheck(*orders).run();
  } catch (const std::exception&) {
    return 0;
  }
}
