// W for rounds of F and I, and how long all of it takes: fastpipe/schedules/rounds.py, sooner, and number by number the
// same.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <tuple>
#include <vector>

#include "plan/orders.h"

namespace fastpipe::plan {

namespace {

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

extern "C" int32_t fastpipe_plan_fill(const PlanSteps* steps, int32_t* rows, double* makespan) {
  return fastpipe::plan::guarded<int32_t>(-1, [&] { return fastpipe::plan::fill_all(*steps, rows, makespan); });
}
