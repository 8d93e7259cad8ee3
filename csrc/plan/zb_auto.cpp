// The search of zb_auto: fastpipe/schedules/zb_auto.py, sooner, and number by number the same.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <exception>
#include <limits>
#include <vector>

#include "plan/orders.h"
#include "plan/plan.h"

namespace fastpipe::plan {

namespace {

constexpr int kForward = 0;
constexpr int kInput = 1;
constexpr int kWeight = 2;

// One order, built by appending to the ranks; every rank's clock runs along.
class OneStageAttempt {
 public:
  OneStageAttempt(const PlanZeroBubble& given, int choices)
      : given_(given),
        seconds_{given.forward, given.backward_input, given.backward_weight},
        overshoot_((choices & 4) == 0),
        backward_first_((choices & 2) == 0),
        fill_((choices & 1) == 0),
        ranks_(given.num_ranks) {
    for (Rank& rank : ranks_) {
      rank.order.reserve(3 * static_cast<size_t>(given.num_microbatches));
      for (auto& ends : rank.ends) ends.reserve(given.num_microbatches);
    }
  }

  double run() {
    warm_up();
    for (int32_t mb = 1; mb < given_.num_microbatches; ++mb) {
      forwards();
      backwards(mb);
    }
    double span = 0.0;
    for (int32_t rank = 0; rank < given_.num_ranks; ++rank) {
      while (count(kWeight, rank) < given_.num_microbatches) put(kWeight, rank);
      const auto& ends = ranks_[rank].ends;
      span = std::max(span, ends[kWeight].back() - ends[kForward].front() + seconds_[kForward][rank]);
    }
    return span;
  }

  // False if a rank's order is not complete.
  bool write(int32_t* kinds) const {
    return write_orders(ranks_, 3 * static_cast<size_t>(given_.num_microbatches), kinds);
  }

 private:
  struct Rank {
    std::vector<int32_t> order;
    std::array<std::vector<double>, 3> ends;
    double clock = 0.0;
    double bubble = 0.0;
  };

  int32_t count(int kind, int32_t rank) const { return static_cast<int32_t>(ranks_[rank].ends[kind].size()); }
  int32_t live(int32_t rank) const { return count(kForward, rank) - count(kWeight, rank); }
  bool has_weight(int32_t rank) const { return count(kWeight, rank) < count(kInput, rank); }

  // When the input of the rank's next F or I is there; before everything where nothing is waited for.
  double arrival(int kind, int32_t rank) const {
    const int32_t source = kind == kForward ? rank - 1 : rank + 1;
    if (kind == kWeight || source < 0 || source >= given_.num_ranks) return -std::numeric_limits<double>::infinity();
    return ranks_[source].ends[kind].at(count(kind, rank)) + given_.comm;
  }

  void put(int kind, int32_t number) {
    Rank& rank = ranks_[number];
    const double seconds = seconds_[kind][number];
    const double busy = rank.clock + seconds;
    const double end = std::max(busy, arrival(kind, number) + seconds);
    if (!rank.ends[kForward].empty()) {
      rank.bubble += end - busy;
      longest_ = std::max(longest_, rank.bubble);
    }
    rank.clock = end;
    rank.ends[kind].push_back(end);
    rank.order.push_back(kind);
  }

  // One F on every rank, those that fit before its first I, and that I.
  void warm_up() {
    for (int32_t rank = 0; rank < given_.num_ranks; ++rank) put(kForward, rank);
    const std::vector<int32_t> extra = warm_up_counts();
    for (int32_t rank = 0; rank < given_.num_ranks; ++rank) {
      for (int32_t i = 0; i < extra[rank]; ++i) put(kForward, rank);
    }
    for (int32_t rank = given_.num_ranks - 1; rank >= 0; --rank) put(kInput, rank);
  }

  std::vector<int32_t> warm_up_counts() const {
    const int32_t last = given_.num_ranks - 1;
    const int32_t m = given_.num_microbatches;
    std::vector<int32_t> extra(given_.num_ranks, 0);
    double time = ranks_[last].ends[kForward].front() + seconds_[kInput][last];
    for (int32_t rank = last - 1; rank >= 0; --rank) {
      double clock = ranks_[rank].clock;
      const double seconds = seconds_[kForward][rank];
      while (1 + extra[rank] < m && 2 + extra[rank] <= given_.limit[rank] &&
             !is_too_late(clock, seconds, time + given_.comm)) {
        clock += seconds;
        ++extra[rank];
      }
      time = std::max(clock, time + given_.comm) + seconds_[kInput][rank];
    }
    for (int32_t rank = 1; rank < given_.num_ranks; ++rank) {
      if (extra[rank] + 1 < m || extra[rank] > extra[rank - 1]) {
        extra[rank] = std::max(0, std::min(extra[rank], extra[rank - 1] - 1));
      }
    }
    return extra;
  }

  bool is_too_late(double clock, double seconds, double first_input) const {
    return overshoot_ ? clock + seconds > first_input : clock >= first_input;
  }

  // One F on every rank that wants one, unless a later rank leaves it out.
  void forwards() {
    std::vector<char> wanted(given_.num_ranks);
    for (int32_t rank = 0; rank < given_.num_ranks; ++rank) wanted[rank] = wants_forward(rank);
    for (int32_t rank = given_.num_ranks - 2; rank >= 0; --rank) wanted[rank] = wanted[rank] && wanted[rank + 1];
    for (int32_t rank = 0; rank < given_.num_ranks; ++rank) {
      if (!wanted[rank]) continue;
      while (live(rank) + 1 > given_.limit[rank]) put(kWeight, rank);
      fill_wait(kForward, rank);
      put(kForward, rank);
    }
  }

  bool wants_forward(int32_t rank) const {
    const int32_t ahead = count(kForward, rank);
    if (ahead >= given_.num_microbatches) return false;
    const int32_t after = rank + 1;
    if (!backward_first_ || after == given_.num_ranks || ahead < count(kForward, after) + 2) return true;
    const double back = ranks_[after].clock + seconds_[kForward][after] + seconds_[kInput][after] + given_.comm;
    const double clock = ranks_[rank].clock;
    if (clock >= back) return false;
    const double excess = std::ceil(live(rank) + 1 - given_.limit[rank]);
    const double most = std::min<double>(count(kInput, rank) - count(kWeight, rank), std::max(0.0, excess));
    double freed = 0.0;
    for (int32_t i = 0; i < most; ++i) freed += seconds_[kWeight][rank];
    if (clock + seconds_[kForward][rank] + freed <= back) return true;
    return back - clock > longest_ - ranks_[rank].bubble;
  }

  void backwards(int32_t mb) {
    for (int32_t rank = given_.num_ranks - 1; rank >= 0; --rank) {
      fill_wait(kInput, rank);
      if (rank == 0 && count(kForward, rank) == given_.num_microbatches) {
        while (count(kWeight, rank) < mb) put(kWeight, rank);
      }
      put(kInput, rank);
    }
  }

  // W where the rank would wait: those that fit, and one more where a longer bubble does not hide it.
  void fill_wait(int kind, int32_t number) {
    Rank& rank = ranks_[number];
    const double until = arrival(kind, number);
    const double seconds = seconds_[kWeight][number];
    while (has_weight(number) && rank.clock + seconds <= until) put(kWeight, number);
    if (has_weight(number) && rank.clock < until) {
      const bool hidden = until - rank.clock <= longest_ - rank.bubble;
      if (fill_ || !hidden) put(kWeight, number);
    }
  }

  const PlanZeroBubble& given_;
  const std::array<const double*, 3> seconds_;
  const bool overshoot_;
  const bool backward_first_;
  const bool fill_;
  std::vector<Rank> ranks_;
  double longest_ = 0.0;
};

}  // namespace

}  // namespace fastpipe::plan

extern "C" int32_t fastpipe_plan_zb_auto(const PlanZeroBubble* given, int32_t* kinds) {
  try {
    double shortest = std::numeric_limits<double>::infinity();
    bool complete = false;
    for (int choices = 0; choices < 8; ++choices) {
      fastpipe::plan::OneStageAttempt attempt(*given, choices);
      const double span = attempt.run();
      if (span < shortest) {
        shortest = span;
        complete = attempt.write(kinds);
      }
    }
    return complete;
  } catch (const std::exception&) {
    return 0;
  }
}
