// The search of zbv: fastpipe/schedules/zbv.py, sooner, and number by number the same.
#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "plan/orders.h"
#include "plan/plan.h"

namespace fastpipe::plan {

namespace {

// What a rank does for one microbatch, in the order of the V: 0 is its stage on the way down, 1 on the way up.
enum Kind : int32_t { kF0, kF1, kI1, kI0, kW1, kW0 };

constexpr double kBefore = -std::numeric_limits<double>::infinity();

class VAttempt {
 public:
  VAttempt(const PlanZeroBubble& given, bool fill_i1, bool fill_f, const std::vector<double>& approved)
      : given_(given),
        limit_(*given.limit),
        weight_(*given.backward_weight),
        seconds_{*given.forward, *given.forward, *given.backward_input, *given.backward_input},
        fill_{fill_f, fill_f, fill_i1, true},
        ranks_(given.num_ranks) {
    const double most = *std::max_element(approved.begin(), approved.end());
    for (int32_t i = 0; i < given.num_ranks; ++i) {
      ranks_[i].slack = most - approved[i];
      ranks_[i].order.reserve(6 * static_cast<size_t>(given.num_microbatches));
      for (auto& ends : ranks_[i].ends) ends.reserve(given.num_microbatches);
    }
  }

  void run() {
    ramp_down();
    ramp_up();
    for (int32_t turn = 0; turn < 2 * given_.num_microbatches; ++turn) {
      backwards();
      forwards();
    }
    for (int32_t rank = 0; rank < given_.num_ranks; ++rank) {
      while (has_weight(rank)) put_weight(rank);
    }
  }

  double longest() const { return longest_; }

  std::vector<double> bubbles() const {
    std::vector<double> found;
    for (const Rank& rank : ranks_) found.push_back(rank.bubble);
    return found;
  }

  // False if a rank's order is not complete.
  bool write(int32_t* kinds) const {
    return write_orders(ranks_, 6 * static_cast<size_t>(given_.num_microbatches), kinds);
  }

 private:
  struct Rank {
    std::vector<int32_t> order;
    std::array<std::vector<double>, 4> ends;
    std::vector<int32_t> inputs;
    size_t num_weights = 0;
    double clock = 0.0;
    double bubble = 0.0;
    double slack = 0.0;
  };

  int32_t count(int32_t kind, int32_t rank) const { return static_cast<int32_t>(ranks_[rank].ends[kind].size()); }
  int32_t live(int32_t rank) const {
    return count(kF0, rank) + count(kF1, rank) - static_cast<int32_t>(ranks_[rank].num_weights);
  }
  bool has_weight(int32_t rank) const { return ranks_[rank].num_weights < ranks_[rank].inputs.size(); }
  int32_t source(int32_t kind, int32_t rank) const { return kind == kF0 || kind == kI1 ? rank - 1 : rank + 1; }
  bool is_own(int32_t source) const { return source < 0 || source >= given_.num_ranks; }

  // Whether the neighbour has done what the rank's next action of this kind needs.
  bool has_arrived(int32_t kind, int32_t rank) const {
    const int32_t from = source(kind, rank);
    return is_own(from) || count(kind, from) > count(kind, rank);
  }

  // When that is there; before everything where the rank itself provides it.
  double arrival(int32_t kind, int32_t rank) const {
    const int32_t from = source(kind, rank);
    return is_own(from) ? kBefore : ranks_[from].ends[kind].at(count(kind, rank)) + given_.comm;
  }

  void put(int32_t kind, int32_t number) {
    Rank& rank = ranks_[number];
    const double seconds = seconds_[kind];
    const double busy = rank.clock + seconds;
    const double end = std::max(busy, arrival(kind, number) + seconds);
    if (!rank.ends[kF0].empty()) {
      rank.bubble += end - busy;
      longest_ = std::max(longest_, rank.bubble);
    }
    rank.order.push_back(kind);
    rank.clock = end;
    rank.ends[kind].push_back(end);
    if (kind == kI1 || kind == kI0) rank.inputs.push_back(kind);
  }

  // The oldest W that waits.
  void put_weight(int32_t number) {
    Rank& rank = ranks_[number];
    rank.order.push_back(rank.inputs.at(rank.num_weights++) == kI1 ? kW1 : kW0);
    rank.clock += weight_;
  }

  // The first F0 of every rank, then more of them while the first F1 comes back up.
  void ramp_down() {
    const int32_t last = given_.num_ranks - 1;
    for (int32_t rank = 0; rank <= last; ++rank) put(kF0, rank);
    put(kF1, last);
    for (int32_t rank = last - 1; rank >= 0; --rank) {
      while (live(rank) + 2 + 2 * rank <= limit_ && ranks_[rank].clock + *given_.forward <= arrival(kF1, rank) &&
             count(kF0, rank) < given_.num_microbatches) {
        for (int32_t earlier = 0; earlier <= rank; ++earlier) put(kF0, earlier);
      }
      put(kF1, rank);
    }
  }

  // F0 and F1 in turn, until every rank has as many forwards as the one before it.
  void ramp_up() {
    int32_t kind = kF0;
    for (int32_t rank = 1; rank < given_.num_ranks; ++rank) {
      while (is_behind(rank)) {
        for (int32_t later = given_.num_ranks - 1; later >= rank; --later) {
          if (count(kind, later) < given_.num_microbatches) put(kind, later);
        }
        kind = kind == kF0 ? kF1 : kF0;
      }
    }
  }

  bool is_behind(int32_t rank) const {
    const int32_t before = count(kF1, rank - 1);
    return count(kF0, rank) + count(kF1, rank) < count(kF0, rank - 1) + before ||
           (count(kF1, rank) <= before && before < given_.num_microbatches);
  }

  // One I a rank: those of the way down from the last rank on, then those of the way up from the first.
  void backwards() {
    std::vector<std::pair<int32_t, int32_t>> turns;
    for (int32_t rank = given_.num_ranks - 1; rank >= 0; --rank) {
      if (goes_down(rank)) turns.emplace_back(rank, kI0);
    }
    for (int32_t rank = 0; rank < given_.num_ranks; ++rank) {
      if (!goes_down(rank)) turns.emplace_back(rank, kI1);
    }
    for (const auto& [rank, kind] : turns) {
      fill_wait(kind, rank);
      put(kind, rank);
    }
  }

  bool goes_down(int32_t rank) const {
    if (count(kI0, rank) >= count(kI1, rank)) return false;
    return has_arrived(kI0, rank) || count(kI1, rank) >= given_.num_microbatches;
  }

  void forwards() {
    for (int32_t rank = 0; rank < given_.num_ranks; ++rank) {
      const int32_t kind = next_forward(rank);
      if (kind < 0) continue;
      while (live(rank) + 1 > limit_) put_weight(rank);
      fill_wait(kind, rank);
      put(kind, rank);
    }
  }

  int32_t next_forward(int32_t rank) const {
    const int32_t down = count(kF0, rank);
    const int32_t up = count(kF1, rank);
    if (up >= given_.num_microbatches) return -1;
    if (up >= down) return kF0;
    if (has_arrived(kF1, rank)) return kF1;
    return down < given_.num_microbatches && has_arrived(kF0, rank) ? kF0 : -1;
  }

  // W where the rank would wait: those that fit, and one more where a longer bubble does not hide it.
  void fill_wait(int32_t kind, int32_t number) {
    const Rank& rank = ranks_[number];
    const double until = arrival(kind, number);
    while (has_weight(number) && until >= rank.clock + weight_) put_weight(number);
    const double hidden = std::max(longest_, rank.slack) - rank.bubble;
    if (has_weight(number) && until - rank.clock > hidden && fill_[kind]) put_weight(number);
  }

  const PlanZeroBubble& given_;
  const double limit_;
  const double weight_;
  const std::array<double, 4> seconds_;
  const std::array<bool, 4> fill_;
  std::vector<Rank> ranks_;
  double longest_ = 0.0;
};

}  // namespace

}  // namespace fastpipe::plan

extern "C" int32_t fastpipe_plan_zbv(const PlanZeroBubble* given, int32_t* kinds) {
  using fastpipe::plan::VAttempt;
  try {
    double shortest = std::numeric_limits<double>::infinity();
    bool complete = false;
    for (int choices = 0; choices < 4; ++choices) {
      const auto attempt = [&](const std::vector<double>& approved) {
        auto made = std::make_unique<VAttempt>(*given, (choices & 2) == 0, (choices & 1) == 0, approved);
        made->run();
        return made;
      };
      auto best = attempt(std::vector<double>(given->num_ranks, 0.0));
      for (;;) {
        auto again = attempt(best->bubbles());
        if (again->longest() >= best->longest()) break;
        best = std::move(again);
      }
      if (best->longest() < shortest) {
        shortest = best->longest();
        complete = best->write(kinds);
      }
    }
    return complete;
  } catch (const std::exception&) {
    return 0;
  }
}
