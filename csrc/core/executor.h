// The loop: one rank's program, instruction by instruction, with its references resolved so that it looks nothing up.
// What it asks of others comes first: stages that compute, an observer; then pairs of a forward and a backward.
#pragma once

#include <array>
#include <atomic>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "common.h"
#include "program.h"
#include "transport.h"

namespace fastpipe {

// One stage's compute, microbatch by microbatch. It keeps what lies between a forward and its backward.
class Stage {
 public:
  Stage() = default;
  Stage(const Stage&) = delete;
  Stage& operator=(const Stage&) = delete;
  virtual ~Stage() = default;

  virtual bool is_first() const = 0;
  virtual bool is_last() const = 0;

  // `input` is null on the first stage.
  virtual void forward(std::int32_t microbatch, const Payload* input) = 0;
  // `gradient` is null on the last stage, whose root is the loss.
  virtual void backward(std::int32_t microbatch, const Payload* gradient) = 0;
  virtual void backward_input(std::int32_t microbatch, const Payload* gradient) = 0;
  virtual void backward_weight(std::int32_t microbatch) = 0;
  // UNSHARD, RESHARD or REDUCE_GRAD: runs a collective of the stage and its replicas in other pipelines. In a failed
  // step, too, since they wait for one another; `failed` says so. Nothing for a stage without replicas.
  virtual void run_collective(Op, bool /*failed*/) {}
  // Whether this stage's forward may run while the other's backward does.
  virtual bool can_overlap(const Stage&) const { return true; }
  // Whether the two are to run in turns, where the rank has such pairs.
  virtual bool can_alternate(const Stage&) const { return false; }
  // Whether its backward has points at which it passes the turn.
  virtual bool exchanges() const { return false; }
  // Runs a forward and another stage's full backward in a way of their own, or does nothing and returns false.
  virtual bool fuse(std::int32_t, const Payload*, Stage&, std::int32_t, const Payload*) { return false; }
  // Moves what the microbatch's last forward (activation) or backward (gradient) produced into `into`.
  virtual void take(ChannelKind kind, std::int32_t microbatch, Payload& into) = 0;
  // Around what the loop and the transport do for this stage between its own methods: a device with queues queues it
  // behind the stage's work. By the rank's own thread, never one in another.
  virtual void begin_turn() {}
  virtual void end_turn() noexcept {}
  // Frees all that is kept, of every microbatch.
  virtual void release() noexcept = 0;
};

// Follows a step while it runs.
class Observer {
 public:
  Observer() = default;
  Observer(const Observer&) = delete;
  Observer& operator=(const Observer&) = delete;
  virtual ~Observer() = default;

  // What it throws is the failure of this position.
  virtual void starts(std::size_t position) = 0;
  virtual void ends(std::size_t position) noexcept = 0;
  // Runs the backward of a pair, in the helper thread, as the rank's own thread would.
  virtual void run_overlapped(std::size_t, FunctionRef<void()> backward) { backward(); }
  // Runs a pair in two threads of which one runs at a time.
  virtual void run_in_turns(std::size_t, FunctionRef<void()> forward, FunctionRef<void()> backward,
                            bool /*backward_first*/) {
    forward();
    backward();
  }
  // Called once for the compute that failed, and once for every peer that broke.
  virtual void failed(std::size_t position, const std::exception_ptr& error) noexcept = 0;
};

// Which way the pairs of two stages go. Two pairs in a row that go one way each are a round, and the faster way has its
// vote: what disturbs the machine for longer than a pair disturbs both. Which way comes first alternates. All other
// pairs go the way that had more of the last votes. Rounds come often to begin with and then seldom, but for ever, so
// that no verdict outlives its machine.
class PairClock {
 public:
  static constexpr std::size_t kVotes = 8;
  // Pairs from round to round, each for as many rounds as there are votes; then the last one. Primes, so that rounds
  // come to another place in every step.
  static constexpr std::array<std::size_t, 4> kPeriods{7, 13, 29, 61};

  // Whether the next pair is to be run together.
  bool next() const;
  // How long that one took.
  void note(double seconds);

 private:
  void vote(bool together);

  std::size_t num_rounds_ = 0;
  std::size_t place_ = 0;      // of the next pair: the first two are the round's
  double first_ = 0;           // seconds of the round's first pair
  std::bitset<kVotes> votes_;  // a bit a round, the last one lowest: together was faster
  bool best_ = false;
};

// How pairs of a forward and a backward run; fastpipe/runtime/stage/pairs.py has the same.
enum class PairWay : std::int32_t { kInOrder = 0, kTogether, kMeasured, kInTurns };

struct PairCounts {
  std::int64_t together = 0;
  std::int64_t in_order = 0;
  std::int64_t fused = 0;
  std::int64_t in_turns = 0;
};

// One half of a pair.
struct PairPart {
  Stage& stage;
  std::int32_t microbatch;
  const Payload* given;  // the forward's input or the backward's gradient; null where there is none
};

class Pairs {
 public:
  // num_pairs: how many different pairs of stages there are.
  Pairs(PairWay way, std::size_t num_pairs) : way_(way), clocks_(num_pairs) {}

  // pair: the number of its stages. When both parts fail, the forward's error is thrown.
  void run(std::int32_t pair, const PairPart& forward, const PairPart& backward, std::size_t position,
           Observer& observer);
  const PairCounts& counts() const { return counts_; }

 private:
  void in_order(const PairPart& forward, const PairPart& backward);
  void together(const PairPart& forward, const PairPart& backward, std::size_t position, Observer& observer);
  void in_turns(const PairPart& forward, const PairPart& backward, std::size_t position, Observer& observer);

  PairWay way_;
  PairCounts counts_;
  std::vector<PairClock> clocks_;   // by the pair's number
  std::unique_ptr<Helper> helper_;  // made when it is needed
};

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
  Stage* stage;       // computes, produces what is sent or handed over, or consumes what is received
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

  // One step. `start` and `end` receive program().size() times each, in seconds of the steady clock. What an
  // instruction raises is reported to `observer`, and the step is drained: every transfer still takes place, so that
  // all channels are empty and in step afterwards. What is wrong before the first one or after the last one is thrown.
  Outcome run(std::int64_t signature, bool announce, Observer& observer, double* start, double* end,
              bool drain = false);
  // From any thread: the step that runs, or is about to, has failed elsewhere.
  void fail() { failed_.store(true, std::memory_order_relaxed); }
  void forget_failure() { failed_ = false; }
  // The first error of the last step. It is not kept: it may hold on to all that the failed call was working on.
  std::exception_ptr take_error() { return std::exchange(error_, nullptr); }
  // Between steps: that in which messages are received, and which is kept from step to step.
  void drop_memory() noexcept;
  // After a step, when its device has come to its end: throws what the transport has noticed since.
  void check() const { transport_->check(); }
  // From any thread: where the step is in the program; its size between steps.
  std::size_t position() const { return position_.load(std::memory_order_relaxed); }
  const RankProgram& program() const { return program_; }
  const PairCounts& pair_counts() const { return pairs_.counts(); }

 private:
  void execute(const Step& step, std::size_t position);
  // failed: the step has, and is drained.
  void perform(const Step& step, std::size_t position, bool failed);
  void compute(const Step& step, std::size_t position);
  void send(const Step& step);
  void wait_send(const Step& step);
  void report(std::size_t position);
  Outcome finish();
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
  std::atomic<std::size_t> position_;
  std::exception_ptr error_;
  Observer* observer_ = nullptr;
  double send_completed_ = 0;  // by the last WAIT_SEND
};

}  // namespace fastpipe
