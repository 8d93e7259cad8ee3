// The loop: one rank's program, instruction by instruction, with its references resolved so that it looks nothing up.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "pairs.h"
#include "program.h"
#include "stage.h"
#include "transport.h"

namespace fastpipe {

// The stages of a rank by the model's stage index; null where the stage is on another rank.
using Stages = std::vector<std::unique_ptr<Stage>>;

struct Step {
  Op op;
  std::int32_t microbatch;
  std::int32_t pair_microbatch;
  std::int32_t slot;
  // Where a compute action finds its input and its gradient; kNone on the first and the last stage.
  std::int32_t input_slot;
  std::int32_t gradient_slot;
  std::int32_t pair;  // of an OVERLAP_F_B: the number of its two stages, from 0; else kNone
  ChannelKind kind;
  Stage* stage;       // who computes, produces what is sent or handed over, or consumes what is received
  Stage* pair_stage;  // whose backward an OVERLAP_F_B runs
  Transfer transfer;  // for WAIT_SEND: that of its SEND
};

// Throws ArgumentError for an instruction that names a stage, slot or send that is not there.
std::vector<Step> resolve(const RankProgram& program, const Stages& stages);

using PayloadFactory = std::function<std::unique_ptr<Payload>()>;

enum class Outcome {
  kDone,
  kFailed,   // here: take_error() says by what
  kDrained,  // elsewhere: nothing was raised on this rank
};

class Executor {
 public:
  Executor(RankProgram program, Stages stages, std::unique_ptr<Transport> transport, const PayloadFactory& make,
           PairWay pairs = PairWay::kInOrder);

  // One step. `start` and `end` receive program().size() times each, in seconds of the steady clock. Only what is
  // wrong before the first instruction is thrown; what fails later is told to `observer`, and the step is drained:
  // every transfer still takes place, so that all channels are empty and in step afterwards.
  Outcome run(std::int64_t signature, bool announce, Observer& observer, double* start, double* end,
              bool drain = false);
  // From any thread: the step that runs, or is about to, has failed elsewhere.
  void fail() { failed_.store(true, std::memory_order_relaxed); }
  void forget_failure() { failed_ = false; }
  // The first error of the last step. It is not kept: it may hold on to all that the failed call was working on.
  std::exception_ptr take_error() { return std::exchange(error_, nullptr); }
  // After a step, when its device has come to its end: throws what the transport has found out since.
  void check() const { transport_->check(); }
  const RankProgram& program() const { return program_; }
  const PairCounts& pair_counts() const { return pairs_.counts(); }

 private:
  void execute(const Step& step, std::size_t position);
  void perform(const Step& step, std::size_t position);
  void compute(const Step& step, std::size_t position);
  void drain(const Step& step, std::size_t position);
  void drain_transfer(const Step& step);
  void wait_receive(const Step& step);
  void send(const Step& step);
  void wait_send(const Step& step);
  void report(std::size_t position);
  Outcome finish();
  bool empty() const;
  void clear() noexcept;
  const Payload* slot(std::int32_t number) const { return number == kNone ? nullptr : slots_[number].get(); }

  RankProgram program_;
  Stages stages_;
  std::vector<Step> steps_;
  // After the stages, so that what is under way ends before what it reads.
  std::vector<std::unique_ptr<Payload>> slots_;
  std::vector<std::unique_ptr<Payload>> sends_;
  std::unique_ptr<Transport> transport_;
  Pairs pairs_;

  std::atomic<bool> failed_{false};
  std::exception_ptr error_;
  Observer* observer_ = nullptr;
  double send_completed_ = 0;  // by the last WAIT_SEND
};

}  // namespace fastpipe
