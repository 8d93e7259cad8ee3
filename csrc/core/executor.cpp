#include "executor.h"

#include <algorithm>
#include <utility>

#include "clock.h"
#include "errors.h"

namespace fastpipe {

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
      pairs_(pairs, count_pairs(steps_)) {}

Outcome Executor::run(std::int64_t signature, bool announce, Observer& observer, double* start, double* end,
                      bool drain) {
  failed_.store(drain, std::memory_order_relaxed);
  error_ = nullptr;
  observer_ = &observer;
  transport_->begin_step(signature, announce);
  double now = now_seconds();
  for (std::size_t position = 0; position < steps_.size(); ++position) {
    const Step& step = steps_[position];
    start[position] = now;
    execute(step, position);
    now = now_seconds();
    end[position] = now;
    if (step.op == Op::kWaitSend) end[step.transfer.position] = send_completed_ > 0 ? send_completed_ : now;
  }
  return finish();
}

void Executor::execute(const Step& step, std::size_t position) {
  const Turn turn(is_compute(step.op) ? nullptr : step.stage);
  if (!failed_.load(std::memory_order_relaxed)) {
    observer_->starts(position);
    try {
      perform(step, position);
      observer_->ends(position);
      return;
    } catch (...) {
      observer_->ends(position);
      report(position);
    }
  }
  // An instruction that failed has not begun its transfer, or has broken its peer: draining it does the rest.
  drain(step, position);
}

void Executor::perform(const Step& step, std::size_t position) {
  switch (step.op) {
    case Op::kPostRecv:
      return transport_->post_receive(step.transfer, step.slot, *slots_[step.slot]);
    case Op::kWaitRecv:
      return wait_receive(step);
    case Op::kSend:
      return send(step);
    case Op::kWaitSend:
      return wait_send(step);
    case Op::kHandOver:
      return step.stage->take(step.kind, step.microbatch, *slots_[step.slot]);
    case Op::kFree:
      return slots_[step.slot]->clear();
    case Op::kUnshard:
    case Op::kReshard:
    case Op::kReduceGrad:
      return step.stage->meet(step.op, false);
    default:
      return compute(step, position);
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
    case Op::kOverlapFB:
      return pairs_.run(step.pair, {stage, step.microbatch, slot(step.input_slot)},
                        {*step.pair_stage, step.pair_microbatch, slot(step.gradient_slot)}, position, *observer_);
    default:
      throw Error(program_.place(step.transfer.position) + ": no compute; this is a bug in fastpipe");
  }
}

void Executor::wait_receive(const Step& step) {
  // The stand-in's sender has failed and has told everybody why: here there is nothing to report.
  if (!transport_->wait_receive(step.slot)) fail();
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

void Executor::drain(const Step& step, std::size_t position) {
  try {
    drain_transfer(step);
  } catch (...) {
    report(position);
  }
}

void Executor::drain_transfer(const Step& step) {
  switch (step.op) {
    case Op::kPostRecv:
      return transport_->post_receive(step.transfer, step.slot, *slots_[step.slot]);
    case Op::kWaitRecv:
      transport_->wait_receive(step.slot);
      return;
    case Op::kSend:
      return transport_->post_stand_in(step.transfer, step.slot);
    case Op::kWaitSend:
      return wait_send(step);
    case Op::kFree:
      return slots_[step.slot]->clear();
    case Op::kUnshard:
    case Op::kReshard:
    case Op::kReduceGrad:
      return step.stage->meet(step.op, true);
    default:
      return;
  }
}

void Executor::report(std::size_t position) {
  const std::exception_ptr error = std::current_exception();
  if (!error_) error_ = error;
  observer_->failed(position, error);
  fail();
}

Outcome Executor::finish() {
  // fail() from now on is too late for this step.
  const bool failed = failed_.load(std::memory_order_relaxed);
  bool left_over = false;
  try {
    transport_->end_step(!failed);
    left_over = !failed && !empty();
  } catch (...) {
    clear();
    throw;
  }
  clear();
  if (left_over) {
    throw Error("rank " + std::to_string(program_.rank()) +
                ": a receive slot or a send was not freed by the program; lower the schedule again and validate it");
  }
  if (error_) return Outcome::kFailed;
  return failed ? Outcome::kDrained : Outcome::kDone;
}

bool Executor::empty() const {
  return all_empty(slots_) && all_empty(sends_);
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
