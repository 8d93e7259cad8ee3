// Words of the planning library: the numbers of fastpipe/action.py and fastpipe/program.py, and a view of the columns.
#pragma once

#include <array>
#include <cstdint>

#include "plan/plan.h"

namespace fastpipe::plan {

constexpr int32_t kNone = -1;

enum Op : int32_t {
  kF = 0,
  kB = 1,
  kI = 2,
  kW = 3,
  kOverlap = 4,
  kUnshard = 5,
  kReduceGrad = 7,
  kPostRecv = 8,
  kWaitRecv = 9,
  kSend = 10,
  kWaitSend = 11,
  kHandOver = 12,
  kFree = 13,
};

enum ChannelKind : int32_t { kActivation = 0, kGradient = 1 };

struct Channel {
  int32_t source;
  int32_t destination;
  int32_t kind;
  bool stays() const { return source == destination; }
};

// The forward or backward that an action consists of; a fused pair has two.
struct Part {
  int32_t kind;
  int32_t stage;
  int32_t microbatch;
};

struct Parts {
  std::array<Part, 2> part;
  int count;
  const Part* begin() const { return part.data(); }
  const Part* end() const { return part.data() + count; }
};

// One rank's rows.
class Rows {
 public:
  Rows(const int32_t* data, int64_t count) : data_(data), count_(count) {}
  int64_t size() const { return count_; }
  int32_t op(int64_t i) const { return data_[i]; }
  int32_t stage(int64_t i) const { return data_[count_ + i]; }
  int32_t microbatch(int64_t i) const { return data_[2 * count_ + i]; }
  int32_t pair_stage(int64_t i) const { return data_[3 * count_ + i]; }
  int32_t pair_microbatch(int64_t i) const { return data_[4 * count_ + i]; }
  int32_t channel(int64_t i) const { return data_[5 * count_ + i]; }
  int32_t slot(int64_t i) const { return data_[6 * count_ + i]; }

  Parts parts(int64_t i) const {
    if (op(i) == kOverlap) {
      return {{Part{kF, stage(i), microbatch(i)}, Part{kB, pair_stage(i), pair_microbatch(i)}}, 2};
    }
    return {{Part{op(i), stage(i), microbatch(i)}, Part{}}, op(i) < kOverlap ? 1 : 0};
  }

 private:
  const int32_t* data_;
  int64_t count_;
};

// What the caller gave, with the placement's rules.
class Orders {
 public:
  explicit Orders(const PlanOrders& given) : given_(given) {}
  int32_t num_ranks() const { return given_.num_ranks; }
  int32_t num_stages() const { return given_.num_stages; }
  int32_t num_microbatches() const { return given_.num_microbatches; }
  int32_t num_channels() const { return given_.num_channels; }
  bool forward_only() const { return given_.forward_only != 0; }
  Rows rows(int32_t rank) const { return Rows(given_.columns[rank], given_.counts[rank]); }

  // Pairs of stage and microbatch.
  int64_t num_pairs() const { return int64_t{num_stages()} * num_microbatches(); }
  int64_t pair(int32_t stage, int32_t microbatch) const { return int64_t{stage} * num_microbatches() + microbatch; }

  int64_t num_entries() const {
    int64_t sum = 0;
    for (int32_t rank = 0; rank < num_ranks(); ++rank) sum += given_.counts[rank];
    return sum;
  }

  bool in_range(int32_t stage, int32_t microbatch) const {
    return stage >= 0 && stage < num_stages() && microbatch >= 0 && microbatch < num_microbatches();
  }

  // The rank of a stage on the microbatch's route; both in range.
  int32_t owner(int32_t stage, int32_t microbatch) const {
    const bool second = given_.num_routes == 2 && microbatch >= num_microbatches() / 2;
    return given_.routes[(second ? num_stages() : 0) + stage];
  }

  bool holds(int32_t rank, int32_t stage) const {
    if (stage < 0 || stage >= num_stages()) return false;
    return given_.routes[stage] == rank || (given_.num_routes == 2 && given_.routes[num_stages() + stage] == rank);
  }

  Channel channel(int32_t number) const {
    const int32_t* row = given_.channels + 3 * number;
    return {row[0], row[1], row[2]};
  }

  // The stage that the result of a forward or backward goes to, or kNone where it ends.
  int32_t target(const Part& part) const {
    if (part.kind == kF) return part.stage + 1 < num_stages() ? part.stage + 1 : kNone;
    return part.kind == kB || part.kind == kI ? part.stage - 1 : kNone;
  }

 private:
  const PlanOrders& given_;
};

}  // namespace fastpipe::plan
