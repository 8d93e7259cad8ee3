#include "steps.h"

#include <map>
#include <string>
#include <utility>

#include "errors.h"

namespace fastpipe {

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
    } else if (is_meeting(it.op)) {
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

}  // namespace fastpipe
