// Is a schedule complete, and can it run? The meaning is that of fastpipe/validate.py and
// fastpipe/dependencies.py. Can a program hang, mismatch a transfer or misuse a buffer? That of
// fastpipe/validate_program.py.
#include <algorithm>
#include <limits>
#include <set>
#include <vector>

#include "plan/machine.h"
#include "plan/orders.h"

namespace fastpipe::plan {

namespace {

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
  // What is known of a (stage, microbatch): which kinds there are (bit = kind), and which events have happened.
  static constexpr uint8_t kForwardDone = 1 << 4;
  static constexpr uint8_t kBackwardDone = 1 << 5;

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

// What is known of a (stage, microbatch).
enum State : uint8_t {
  kForwardDone = 1,
  kBackwardDone = 2,
  kWeightDone = 4,
  kArrived = 8,  // and 16 for the gradient
  kUnsent = 32,  // and 64 for the gradient: computed for this consumer, not yet handed on
};

constexpr uint8_t of_kind(uint8_t activation, int32_t kind) {
  return static_cast<uint8_t>(activation << kind);
}

constexpr int64_t kEmpty = -1;

// A slot or a send in use.
struct Held {
  int64_t key = kEmpty;  // the message
  int32_t channel = kNone;
  bool full = false;
};

class ProgramCheck {
 public:
  explicit ProgramCheck(const Orders& program) : program_(program) {}

  bool run() {
    const int64_t pairs = program_.num_pairs();
    if (pairs > program_.num_entries() * 2 || pairs > std::numeric_limits<int32_t>::max() / 2) return false;
    state_.assign(pairs, 0);
    sent_.resize(program_.num_channels());
    received_.resize(program_.num_channels());
    for (int32_t rank = 0; rank < program_.num_ranks(); ++rank) {
      if (!check_rank(rank)) return false;
    }
    return sent_ == received_ && all_computed();
  }

 private:
  bool check_rank(int32_t rank) {
    const Rows rows = program_.rows(rank);
    rank_ = rank;
    slots_.clear();
    sends_.clear();
    for (int64_t i = 0; i < rows.size(); ++i) {
      const int32_t op = rows.op(i);
      if (op < kF || op > kFree) return false;
      if (!(op < kPostRecv ? computes(rows, i) : moves(rows, i))) return false;
    }
    return all_empty(slots_) && all_empty(sends_);
  }

  static bool all_empty(const std::vector<Held>& held) {
    for (const Held& one : held) {
      if (one.key != kEmpty) return false;
    }
    return true;
  }

  bool all_computed() const {
    const uint8_t wanted = program_.forward_only() ? kForwardDone : kForwardDone | kBackwardDone | kWeightDone;
    for (const uint8_t state : state_) {
      if ((state & (kUnsent | kUnsent << 1)) != 0 || (state & wanted) != wanted) return false;
    }
    return true;
  }

  // --- compute ---

  bool computes(const Rows& rows, int64_t i) {
    const int32_t op = rows.op(i);
    if (rows.channel(i) != kNone || rows.slot(i) != kNone) return false;
    if (op != kOverlap && !without_pair(rows, i)) return false;
    if (op >= kUnshard) return rows.microbatch(i) == kNone && program_.holds(rank_, rows.stage(i));
    if (program_.forward_only() && op != kF) return false;
    const Parts parts = rows.parts(i);
    for (const Part& part : parts) {
      if (!may_start(part)) return false;
    }
    for (const Part& part : parts) {
      if (!finish(part)) return false;
    }
    return true;
  }

  static bool without_pair(const Rows& rows, int64_t i) {
    return rows.pair_stage(i) == kNone && rows.pair_microbatch(i) == kNone;
  }

  bool may_start(const Part& part) const {
    if (!mine(part.stage, part.microbatch)) return false;
    const uint8_t state = state_[program_.pair(part.stage, part.microbatch)];
    if (part.kind == kF) return part.stage == 0 || (state & of_kind(kArrived, kActivation)) != 0;
    if (part.kind == kW) return (state & kBackwardDone) != 0;
    const bool last = part.stage + 1 == program_.num_stages();
    return (state & kForwardDone) != 0 && (last || (state & of_kind(kArrived, kGradient)) != 0);
  }

  bool finish(const Part& part) {
    const uint8_t events = part.kind == kF   ? kForwardDone
                           : part.kind == kB ? kBackwardDone | kWeightDone
                           : part.kind == kI ? kBackwardDone
                                             : kWeightDone;
    uint8_t& state = state_[program_.pair(part.stage, part.microbatch)];
    if ((state & events) != 0) return false;
    state |= events;
    const int32_t target = program_.target(part);
    if (target != kNone) {
      state_[program_.pair(target, part.microbatch)] |= of_kind(kUnsent, part.kind == kF ? kActivation : kGradient);
    }
    return true;
  }

  bool mine(int32_t stage, int32_t microbatch) const {
    return program_.in_range(stage, microbatch) && program_.owner(stage, microbatch) == rank_;
  }

  // --- messages ---

  bool moves(const Rows& rows, int64_t i) {
    const int32_t op = rows.op(i), number = rows.channel(i), slot = rows.slot(i), microbatch = rows.microbatch(i);
    if (!without_pair(rows, i) || number < 0 || number >= program_.num_channels()) return false;
    if (slot < 0 || slot >= rows.size()) return false;
    const Channel channel = program_.channel(number);
    const bool sends = op == kSend || op == kWaitSend;
    if ((sends ? channel.source : channel.destination) != rank_) return false;
    if (op != kFree && channel.stays() != (op == kHandOver)) return false;
    const int32_t down = channel.kind == kActivation ? 1 : -1;
    const int32_t consumer = rows.stage(i) + (sends ? down : 0), producer = consumer - down;
    if (!program_.in_range(consumer, microbatch) || !program_.in_range(producer, microbatch)) return false;
    // a message for another rank's stage could never be freed, nor one of another rank's stage be there to send
    if (!mine(sends ? producer : consumer, microbatch)) return false;
    std::vector<Held>& held = sends ? sends_ : slots_;
    if (static_cast<int64_t>(held.size()) <= slot) held.resize(slot + 1);
    return move(op, {program_.pair(consumer, microbatch), producer, microbatch, number, channel.kind}, held[slot]);
  }

  struct Move {
    int64_t pair;  // of the consumer
    int32_t producer;
    int32_t microbatch;
    int32_t number;
    int32_t kind;
  };

  bool move(int32_t op, const Move& move, Held& held) {
    const int64_t key = 2 * move.pair + move.kind;
    if (op == kPostRecv || op == kSend || op == kHandOver) {
      if (held.key != kEmpty) return false;
      held = {key, move.number, op == kHandOver};
    } else if (held.key != key || held.channel != move.number) {
      return false;
    }
    switch (op) {
      case kPostRecv:
        received_[move.number].push_back(static_cast<uint32_t>(key));
        return true;
      case kWaitRecv:
        return arrive(move, held);
      case kSend:
        sent_[move.number].push_back(static_cast<uint32_t>(key));
        return take_product(move);
      case kHandOver:
        state_[move.pair] |= of_kind(kArrived, move.kind);
        return mine(move.producer, move.microbatch) && take_product(move);
      case kFree:
        return free(move, held);
      default:
        held = {};
        return true;
    }
  }

  bool arrive(const Move& move, Held& held) {
    if (held.full) return false;
    held.full = true;
    state_[move.pair] |= of_kind(kArrived, move.kind);
    return true;
  }

  bool take_product(const Move& move) {
    uint8_t& state = state_[move.pair];
    const uint8_t bit = of_kind(kUnsent, move.kind);
    if ((state & bit) == 0) return false;
    state &= static_cast<uint8_t>(~bit);
    return true;
  }

  bool free(const Move& move, Held& held) {
    uint8_t& state = state_[move.pair];
    if (!held.full || (state & (program_.forward_only() ? kForwardDone : kWeightDone)) == 0) return false;
    state &= static_cast<uint8_t>(~of_kind(kArrived, move.kind));
    held = {};
    return true;
  }

  const Orders& program_;
  int32_t rank_ = 0;
  std::vector<uint8_t> state_;
  std::vector<Held> slots_;
  std::vector<Held> sends_;
  std::vector<std::vector<uint32_t>> sent_;  // by channel: the messages, in order
  std::vector<std::vector<uint32_t>> received_;
};

bool all_different(const int32_t* lane_of, int32_t count) {
  return std::set<int32_t>(lane_of, lane_of + count).size() == static_cast<size_t>(count);
}

// Whatever the timing; where every channel has its lane also when receives are made only at their waits.
bool comes_to_its_end(const Orders& program, const int32_t* lane_of) {
  if (!Machine(program, lane_of, nullptr, nullptr, nullptr).run()) return false;
  if (!all_different(lane_of, program.num_channels())) return true;
  return Machine(program, lane_of, nullptr, nullptr, nullptr, true).run();
}

}  // namespace

}  // namespace fastpipe::plan

extern "C" int32_t fastpipe_plan_validate_schedule(const PlanOrders* orders) {
  return fastpipe::plan::guarded<int32_t>(0, [&] { return fastpipe::plan::ScheduleCheck(*orders).run(); });
}

extern "C" int32_t fastpipe_plan_validate_program(const PlanOrders* program, const int32_t* lane_of) {
  return fastpipe::plan::guarded<int32_t>(0, [&] {
    const fastpipe::plan::Orders orders(*program);
    return fastpipe::plan::ProgramCheck(orders).run() && fastpipe::plan::comes_to_its_end(orders, lane_of);
  });
}
