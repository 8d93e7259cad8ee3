#include "executor.h"

#include <algorithm>
#include <exception>
#include <map>
#include <string>
#include <utility>

#include "common.h"

namespace fastpipe {

bool PairClock::next() const {
  const bool together_first = num_rounds_ % 2 != 0;
  if (place_ == 0) return together_first;
  return place_ == 1 ? !together_first : best_;
}

void PairClock::note(double seconds) {
  if (place_ == 0) first_ = seconds;
  if (place_ == 1) vote(next() ? seconds < first_ : first_ < seconds);
  const std::size_t period = kPeriods[std::min(num_rounds_ / kVotes, kPeriods.size() - 1)];
  place_ = (place_ + 1) % period;
}

void PairClock::vote(bool together) {
  votes_ = votes_ << 1;
  votes_[0] = together;
  ++num_rounds_;
  const std::size_t all = std::min(num_rounds_, kVotes);
  if (2 * votes_.count() != all) best_ = 2 * votes_.count() > all;
}

void Pairs::run(std::int32_t pair, const PairPart& forward, const PairPart& backward, std::size_t position,
                Observer& observer) {
  if (forward.stage.fuse(forward.microbatch, forward.given, backward.stage, backward.microbatch, backward.given)) {
    ++counts_.fused;
    return;
  }
  if (way_ == PairWay::kInTurns && forward.stage.can_alternate(backward.stage)) {
    return in_turns(forward, backward, position, observer);
  }
  const bool one_order = way_ == PairWay::kInOrder || way_ == PairWay::kInTurns;
  if (one_order || !forward.stage.can_overlap(backward.stage)) return in_order(forward, backward);
  if (way_ == PairWay::kTogether) return together(forward, backward, position, observer);
  PairClock& clock = clocks_[pair];
  const double begin = now_seconds();
  if (clock.next()) {
    together(forward, backward, position, observer);
  } else {
    in_order(forward, backward);
  }
  clock.note(now_seconds() - begin);
}

void Pairs::in_order(const PairPart& forward, const PairPart& backward) {
  ++counts_.in_order;
  forward.stage.forward(forward.microbatch, forward.given);
  backward.stage.backward(backward.microbatch, backward.given);
}

void Pairs::together(const PairPart& forward, const PairPart& backward, std::size_t position, Observer& observer) {
  ++counts_.together;
  if (!helper_) helper_ = std::make_unique<Helper>();
  const auto part = [&backward] { backward.stage.backward(backward.microbatch, backward.given); };
  const auto job = [&] { observer.run_overlapped(position, part); };
  helper_->start(job);
  std::exception_ptr error;
  try {
    forward.stage.forward(forward.microbatch, forward.given);
  } catch (...) {
    error = std::current_exception();
  }
  const std::exception_ptr other = helper_->finish();
  if (error) std::rethrow_exception(error);
  if (other) std::rethrow_exception(other);
}

void Pairs::in_turns(const PairPart& forward, const PairPart& backward, std::size_t position, Observer& observer) {
  ++counts_.in_turns;
  observer.run_in_turns(
      position, [&forward] { forward.stage.forward(forward.microbatch, forward.given); },
      [&backward] { backward.stage.backward(backward.microbatch, backward.given); }, backward.stage.exchanges());
}

namespace {

class Resolver {
 public:
  Resolver(const RankProgram& program, const Stages& stages)
      : program_(program),
        stages_(stages),
        inputs_(stages.size() * program.num_microbatches(), kNone),
        gradients_(inputs_),
        sends_(program.num_sends(), nullptr) {}

  std::vector<Step> run() {
    steps_.reserve(program_.size());  // `sends_` points into it
    for (position_ = 0; position_ < program_.size(); ++position_) add(program_[position_]);
    return std::move(steps_);
  }

 private:
  void add(const Instruction& it) {
    Step step{it.op,
              it.microbatch,
              it.pair_microbatch,
              it.slot,
              kNone,
              kNone,
              kNone,
              ChannelKind::kActivation,
              nullptr,
              nullptr,
              {position_, it.channel, it.stage, it.microbatch}};
    if (is_compute(it.op)) {
      compute(it, step);
    } else if (is_collective(it.op)) {
      step.stage = &stage(it.stage);
    } else {
      move(it, step);
    }
    steps_.push_back(step);
    if (it.op == Op::kSend) sends_[it.slot] = &steps_.back().transfer;
  }

  void compute(const Instruction& it, Step& step) {
    step.stage = &stage(it.stage);
    if (it.op == Op::kF || it.op == Op::kOverlapFB) {
      step.input_slot = step.stage->is_first() ? kNone : filled(inputs_, it.stage, it.microbatch, "input");
    }
    if (it.op == Op::kB || it.op == Op::kI) {
      step.gradient_slot = gradient_slot(*step.stage, it.stage, it.microbatch);
    }
    if (it.op == Op::kOverlapFB) {
      step.pair_stage = &stage(it.pair_stage);
      step.gradient_slot = gradient_slot(*step.pair_stage, it.pair_stage, it.pair_microbatch);
      step.pair = pairs_.try_emplace({it.stage, it.pair_stage}, static_cast<std::int32_t>(pairs_.size())).first->second;
    }
  }

  std::int32_t gradient_slot(const Stage& of, std::int32_t stage, std::int32_t microbatch) {
    return of.is_last() ? kNone : filled(gradients_, stage, microbatch, "output gradient");
  }

  void move(const Instruction& it, Step& step) {
    const Channel& channel = program_.channels()[it.channel];
    step.kind = channel.kind;
    const std::int32_t before = channel.kind == ChannelKind::kActivation ? -1 : 1;
    step.stage = &stage(it.stage + (it.op == Op::kHandOver ? before : 0));
    if (it.op == Op::kWaitSend) {
      if (sends_[it.slot] == nullptr) fail("it waits for a send that was not posted");
      step.transfer = *sends_[it.slot];
    }
    if (it.op == Op::kPostRecv || it.op == Op::kHandOver) {
      auto& slots = channel.kind == ChannelKind::kActivation ? inputs_ : gradients_;
      stage(it.stage);
      slots[index(it.stage, it.microbatch)] = it.slot;
    }
  }

  std::size_t index(std::int32_t stage, std::int32_t microbatch) const {
    return static_cast<std::size_t>(stage) * program_.num_microbatches() + microbatch;
  }

  std::int32_t filled(const std::vector<std::int32_t>& slots, std::int32_t stage, std::int32_t microbatch,
                      const char* what) const {
    const std::int32_t slot = slots[index(stage, microbatch)];
    if (slot == kNone) fail(std::string("nothing before it receives its ") + what);
    return slot;
  }

  Stage& stage(std::int32_t index) const {
    if (index < 0 || index >= static_cast<std::int32_t>(stages_.size()) || !stages_[index]) {
      fail("stage " + std::to_string(index) + " is not on this rank; give the executor every stage of its program");
    }
    return *stages_[index];
  }

  [[noreturn]] void fail(const std::string& why) const { throw ArgumentError(program_.place(position_) + ": " + why); }

  const RankProgram& program_;
  const Stages& stages_;
  std::vector<std::int32_t> inputs_;  // by stage and microbatch: the slot
  std::vector<std::int32_t> gradients_;
  std::vector<const Transfer*> sends_;
  std::map<std::pair<std::int32_t, std::int32_t>, std::int32_t> pairs_;
  std::vector<Step> steps_;
  std::size_t position_ = 0;
};

}  // namespace

std::vector<Step> resolve(const RankProgram& program, const Stages& stages) {
  return Resolver(program, stages).run();
}

namespace {

std::vector<std::unique_ptr<Payload>> make_payloads(std::int32_t count, const PayloadFactory& make) {
  std::vector<std::unique_ptr<Payload>> payloads(count);
  std::generate(payloads.begin(), payloads.end(), make);
  return payloads;
}

bool all_empty(const std::vector<std::unique_ptr<Payload>>& payloads) {
  return std::all_of(payloads.begin(), payloads.end(), [](const auto& payload) { return payload->empty(); });
}

std::size_t count_pairs(const std::vector<Step>& steps) {
  std::int32_t highest = kNone;
  for (const Step& step : steps) highest = std::max(highest, step.pair);
  return static_cast<std::size_t>(highest + 1);
}

class Turn {
 public:
  explicit Turn(Stage* stage) : stage_(stage) {
    if (stage_ != nullptr) stage_->begin_turn();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  ~Turn() {
    if (stage_ != nullptr) stage_->end_turn();
  }

 private:
  Stage* stage_;
};

}  // namespace

Executor::Executor(RankProgram program, Stages stages, std::unique_ptr<Transport> transport, const PayloadFactory& make,
                   PairWay pairs)
    : program_(std::move(program)),
      stages_(std::move(stages)),
      steps_(resolve(program_, stages_)),
      slots_(make_payloads(program_.num_slots(), make)),
      sends_(make_payloads(program_.num_sends(), make)),
      transport_(std::move(transport)),
      pairs_(pairs, count_pairs(steps_)),
      position_(steps_.size()) {}

Outcome Executor::run(std::int64_t signature, bool announce, Observer& observer, double* start, double* end,
                      bool drain) {
  if (drain) fail();  // not the reverse: somebody may have said so just before
  error_ = nullptr;
  observer_ = &observer;
  transport_->begin_step(signature, announce);
  double now = now_seconds();
  for (std::size_t position = 0; position < steps_.size(); ++position) {
    const Step& step = steps_[position];
    position_.store(position, std::memory_order_relaxed);
    start[position] = now;
    execute(step, position);
    now = now_seconds();
    end[position] = now;
    if (step.op == Op::kWaitSend) end[step.transfer.position] = send_completed_ > 0 ? send_completed_ : now;
  }
  position_.store(steps_.size(), std::memory_order_relaxed);
  return finish();
}

void Executor::execute(const Step& step, std::size_t position) {
  const Turn turn(is_compute(step.op) ? nullptr : step.stage);
  if (!failed_.load(std::memory_order_relaxed)) {
    try {
      observer_->starts(position);
      perform(step, position, false);
      observer_->ends(position);
      return;
    } catch (...) {
      observer_->ends(position);
      report(position);
    }
  }
  // An instruction that failed has not begun its transfer, or has broken its peer: draining it does the rest.
  try {
    perform(step, position, true);
  } catch (...) {
    report(position);
  }
}

void Executor::perform(const Step& step, std::size_t position, bool failed) {
  switch (step.op) {
    case Op::kPostRecv:
      return transport_->post_receive(step.transfer, step.slot, *slots_[step.slot]);
    case Op::kWaitRecv:
      // False: a stand-in, whose sender has failed and reported why; here there is nothing to report.
      if (!transport_->wait_receive(step.slot)) fail();
      return;
    case Op::kSend:
      return failed ? transport_->post_stand_in(step.transfer, step.slot) : send(step);
    case Op::kWaitSend:
      return wait_send(step);
    case Op::kFree:
      return slots_[step.slot]->clear();
    case Op::kUnshard:
    case Op::kReshard:
    case Op::kReduceGrad:
      return step.stage->run_collective(step.op, failed);
    default:
      if (!failed) compute(step, position);
  }
}

void Executor::compute(const Step& step, std::size_t position) {
  Stage& stage = *step.stage;
  switch (step.op) {
    case Op::kF:
      return stage.forward(step.microbatch, slot(step.input_slot));
    case Op::kB:
      return stage.backward(step.microbatch, slot(step.gradient_slot));
    case Op::kI:
      return stage.backward_input(step.microbatch, slot(step.gradient_slot));
    case Op::kW:
      return stage.backward_weight(step.microbatch);
    case Op::kHandOver:
      return stage.take(step.kind, step.microbatch, *slots_[step.slot]);
    case Op::kOverlapFB:
      return pairs_.run(step.pair, {stage, step.microbatch, slot(step.input_slot)},
                        {*step.pair_stage, step.pair_microbatch, slot(step.gradient_slot)}, position, *observer_);
    default:
      throw Error(program_.place(step.transfer.position) + ": no compute; this is a bug in fastpipe");
  }
}

void Executor::send(const Step& step) {
  Payload& payload = *sends_[step.slot];
  step.stage->take(step.kind, step.microbatch, payload);
  payload.pack();
  transport_->post_send(step.transfer, step.slot, payload);
}

void Executor::wait_send(const Step& step) {
  send_completed_ = 0;
  send_completed_ = transport_->wait_send(step.slot);
  sends_[step.slot]->clear();
}

void Executor::report(std::size_t position) {
  const std::exception_ptr error = std::current_exception();
  if (!error_) error_ = error;
  observer_->failed(position, error);
  fail();
}

Outcome Executor::finish() {
  // fail() from now on is too late for this step.
  const bool failed = failed_.exchange(false);
  try {
    transport_->end_step(!failed);
    if (!failed && !(all_empty(slots_) && all_empty(sends_))) {
      throw Error("rank " + std::to_string(program_.rank()) +
                  ": a receive slot or a send was not freed by the program; lower the schedule again and validate it");
    }
  } catch (...) {
    clear();
    throw;
  }
  clear();
  if (error_) return Outcome::kFailed;
  return failed ? Outcome::kDrained : Outcome::kDone;
}

void Executor::drop_memory() noexcept {
  for (const auto& payload : slots_) payload->drop_memory();
}

void Executor::clear() noexcept {
  for (const auto* payloads : {&slots_, &sends_}) {
    for (const auto& payload : *payloads) {
      payload->clear();
      payload->end_step();
    }
  }
  for (const auto& stage : stages_) {
    if (stage) stage->release();
  }
}

}  // namespace fastpipe
