#include "plan/machine.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

namespace fastpipe::plan {
namespace {

constexpr double kUnderWay = -1.0;
constexpr double kHeld = -2.0;
constexpr double kNothing = -3.0;

}  // namespace

double Machine::compute_seconds(const Rows& rows, int64_t i) const {
  if (costs_ == nullptr) return 0.0;
  const int32_t stage = rows.stage(i);
  switch (rows.op(i)) {
    case kF:
      return costs_->forward[stage];
    case kB:
      return costs_->backward[stage];
    case kI:
      return costs_->backward_input[stage];
    case kW:
      return costs_->backward_weight[stage];
    case kOverlap:
      if (costs_->has_overlapped != 0) return costs_->overlapped[stage];
      return costs_->forward[stage] + costs_->backward[rows.pair_stage(i)];
    default:
      return 0.0;
  }
}

double Machine::transfer_seconds(int32_t channel, int32_t consumer_stage) const {
  if (costs_ == nullptr) return 0.0;
  const int32_t boundary = program_.channel(channel).kind == kActivation ? consumer_stage - 1 : consumer_stage;
  return costs_->latency[channel] + costs_->boundary_bytes[boundary] / costs_->bandwidth[channel];
}

Machine::Machine(const Orders& program, const int32_t* lane_of, const PlanCosts* costs, double* const* starts,
                 double* const* ends, bool late)
    : program_(program), costs_(costs), starts_(starts), ends_(ends), late_(late) {
  const auto ranks = static_cast<size_t>(program.num_ranks());
  clock_.assign(ranks, 0.0);
  position_.assign(ranks, 0);
  sends_.resize(ranks);
  receives_.resize(ranks);
  blocked_.assign(ranks, Wait::kNothing);
  blocked_slot_.assign(ranks, kNone);
  find_ends(lane_of);
}

// A lane has an end, with its queue, on each rank that it touches.
void Machine::find_ends(const int32_t* lane_of) {
  std::map<std::pair<int32_t, int32_t>, int32_t> number;
  const auto end = [&number](int32_t lane, int32_t rank) {
    return number.emplace(std::make_pair(lane, rank), static_cast<int32_t>(number.size())).first->second;
  };
  for (int32_t c = 0; c < program_.num_channels(); ++c) {
    source_end_.push_back(end(lane_of[c], program_.channel(c).source));
    destination_end_.push_back(end(lane_of[c], program_.channel(c).destination));
  }
  queues_.resize(number.size());
  held_.resize(program_.num_channels());
  end_free_.assign(number.size(), 0.0);
}

bool Machine::run() {
  for (int32_t rank = 0; rank < program_.num_ranks(); ++rank) {
    if (!measure(rank)) return false;
    ready_.push_back(rank);
  }
  int32_t finished = 0;
  while (!ready_.empty()) {
    const int32_t rank = ready_.back();
    ready_.pop_back();
    finished += advance(rank);
    if (malformed_) return false;
  }
  return finished == program_.num_ranks();
}

// Everything that is used as an index is checked here, once.
bool Machine::measure(int32_t rank) {
  const Rows rows = program_.rows(rank);
  int32_t slots = 0;
  for (int64_t i = 0; i < rows.size(); ++i) {
    const int32_t op = rows.op(i), stage = rows.stage(i), channel = rows.channel(i);
    if (op < kF || op > kFree || stage < 0 || stage >= program_.num_stages()) return false;
    if (op == kOverlap && (rows.pair_stage(i) < 0 || rows.pair_stage(i) >= program_.num_stages())) return false;
    if (op < kPostRecv) {
      if (channel != kNone) return false;
      continue;
    }
    if (channel < 0 || channel >= program_.num_channels()) return false;
    if (rows.slot(i) < 0 || rows.slot(i) >= rows.size()) return false;
    if (op == kPostRecv && program_.channel(channel).kind == kActivation && stage == 0) return false;
    slots = std::max(slots, rows.slot(i) + 1);
  }
  sends_[rank].assign(slots, kNothing);
  receives_[rank].assign(slots, kNothing);
  if (starts_ != nullptr) {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    std::fill_n(starts_[rank], rows.size(), nan);
    std::fill_n(ends_[rank], rows.size(), nan);
  }
  return true;
}

bool Machine::advance(int32_t rank) {
  const Rows rows = program_.rows(rank);
  for (int64_t& i = position_[rank]; i < rows.size(); ++i) {
    if (!step(rank, rows, i)) return false;
  }
  return true;
}

// Whether the rank can go on.
bool Machine::step(int32_t rank, const Rows& rows, int64_t i) {
  const double start = clock_[rank];
  const int32_t op = rows.op(i);
  if (op == kWaitRecv || op == kWaitSend) {
    if (op == kWaitRecv) release(rank, rows, i);
    if (!wait(rank, op == kWaitSend, rows.slot(i))) return false;
  } else if (op == kSend || op == kPostRecv) {
    if (!post(rank, rows, i)) return false;
  } else if (op < kPostRecv) {
    clock_[rank] = start + compute_seconds(rows, i);
  }
  if (starts_ != nullptr && op != kSend) {
    starts_[rank][i] = start;
    ends_[rank][i] = clock_[rank];
  }
  return true;
}

bool Machine::wait(int32_t rank, bool sends, int32_t slot) {
  const double when = done(rank, sends)[slot];
  if (when >= 0.0) {
    clock_[rank] = std::max(clock_[rank], when);
    return true;
  }
  malformed_ |= when == kNothing;
  blocked_[rank] = sends ? Wait::kSend : Wait::kReceive;
  blocked_slot_[rank] = slot;
  return false;
}

bool Machine::post(int32_t rank, const Rows& rows, int64_t i) {
  const bool sends = rows.op(i) == kSend;
  double& state = done(rank, sends)[rows.slot(i)];
  if (state == kUnderWay || state == kHeld) {
    malformed_ = true;
    return false;
  }
  const Transfer transfer{i, clock_[rank], rank, rows.channel(i), rows.slot(i), sends};
  state = late_ && !sends ? kHeld : kUnderWay;
  if (state == kHeld) {
    held_[transfer.channel].push_back(transfer);
  } else {
    enqueue(transfer);
  }
  return true;
}

// Let a held receive into its lane, after those of its channel that were posted before it.
void Machine::release(int32_t rank, const Rows& rows, int64_t i) {
  std::deque<Transfer>& held = held_[rows.channel(i)];
  while (receives_[rank][rows.slot(i)] == kHeld && !held.empty()) {
    const Transfer first = held.front();
    held.pop_front();
    receives_[rank][first.slot] = kUnderWay;
    enqueue(first);
  }
}

void Machine::enqueue(const Transfer& transfer) {
  const int32_t end = end_of(transfer.channel, transfer.sends);
  queues_[end].push_back(transfer);
  match(end);
}

// Complete what now stands at both heads; each completion may bring up the next, at either end.
void Machine::match(int32_t end) {
  pending_.assign(1, end);
  while (!pending_.empty()) {
    std::deque<Transfer>& mine = queues_[pending_.back()];
    const int32_t here = pending_.back();
    pending_.pop_back();
    if (mine.empty()) continue;
    const Transfer head = mine.front();
    const int32_t there = end_of(head.channel, !head.sends);
    std::deque<Transfer>& theirs = queues_[there];
    if (theirs.empty() || theirs.front().channel != head.channel || theirs.front().sends == head.sends) continue;
    const Transfer mate = theirs.front();
    mine.pop_front();
    theirs.pop_front();
    if (head.sends) {
      complete(head, mate);
    } else {
      complete(mate, head);
    }
    pending_.push_back(here);
    pending_.push_back(there);
  }
}

void Machine::complete(const Transfer& send, const Transfer& receive) {
  double& source_free = end_free_[source_end_[send.channel]];
  double& destination_free = end_free_[destination_end_[send.channel]];
  const double start = std::max({send.posted, receive.posted, source_free, destination_free});
  const int32_t stage = program_.rows(receive.rank).stage(receive.position);
  const double end = start + transfer_seconds(send.channel, stage);
  source_free = destination_free = end;
  if (starts_ != nullptr) {
    starts_[send.rank][send.position] = start;
    ends_[send.rank][send.position] = end;
  }
  finish(send, end);
  finish(receive, end);
}

void Machine::finish(const Transfer& transfer, double end) {
  done(transfer.rank, transfer.sends)[transfer.slot] = end;
  const Wait waits = transfer.sends ? Wait::kSend : Wait::kReceive;
  if (blocked_[transfer.rank] != waits || blocked_slot_[transfer.rank] != transfer.slot) return;
  blocked_[transfer.rank] = Wait::kNothing;
  ready_.push_back(transfer.rank);
}

}  // namespace fastpipe::plan

extern "C" int32_t fastpipe_plan_simulate(const PlanOrders* program, const int32_t* lane_of, const PlanCosts* costs,
                                          double* const* starts, double* const* ends) {
  return fastpipe::plan::guarded<int32_t>(0, [&] {
    const fastpipe::plan::Orders orders(*program);
    return fastpipe::plan::Machine(orders, lane_of, costs, starts, ends).run();
  });
}
