// A stage whose forward is a Python callable and whose backward is torch's engine.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/common.h"
#include "core/executor.h"
#include "core/program.h"
#include "payload.h"
#include "random_numbers.h"
#include "streams.h"
#include "torch_private.h"
#include "weight_grad.h"

namespace fastpipe {

// Which action this thread computes, and the engine's threads that work for it: what fastpipe.current() tells.
class ActionContext final : public ThreadNote::Noted {
 public:
  // Of one stage in one step.
  struct Step {
    std::int64_t number = 0;
    // The microbatches of the stage's last F, last B or I, and last B or W: `last_microbatches` in
    // fastpipe/runtime/stage/context.py.
    std::array<std::int32_t, 3> last{};
  };

  ActionContext(const Step& step, Op op, std::int32_t stage, std::int32_t microbatch);

  // What this thread computes; null when it computes nothing.
  static const ActionContext* current();

  std::int64_t step() const { return step_.number; }
  std::int32_t stage() const { return stage_; }
  std::int32_t microbatch() const { return microbatch_; }
  Op op() const { return op_; }
  bool is_last_microbatch() const;
  bool training() const { return training_; }

 private:
  const Step& step_;
  Op op_;
  std::int32_t stage_;
  std::int32_t microbatch_;
  bool training_;
  ThreadNote note_;
};

// What Python gives for one step. Handles: the caller of the step keeps the objects alive.
struct StageCalls {
  py::handle run;           // (microbatch, tuple of tensors) -> tuple of tensors
  py::handle output_grads;  // (microbatch) -> tuple of tensors or None, or None; null where the root is a loss
  RngGuard* random;         // null where there is nothing to do about random numbers
  py::handle collective;    // (op, failed), also (B or W, false) before the last of them; null without replicas
  py::handle fold;          // () after every W; null where it is not wanted
  // (microbatch, its inputs, stage and microbatch of the backward, its roots, their gradients or None for a loss)
  // -> tuple of tensors; null where the module has no method for pairs.
  py::handle fuse;
  std::vector<std::int32_t> partners;  // the stages whose backwards it takes
  std::int32_t last_backward;          // the microbatch of the last B or W, if `collective` comes before it; else kNone
  // (call) -> nothing: what is around every B, I and W makes the call; null where there is nothing around them
  py::handle around;
  ActionContext::Step context;
  bool exchanges;       // whether its forward has called all_to_all
  bool knows_deferred;  // nobody asks for deferred()
};

class TorchStage final : public Stage {
 public:
  // The program tells which microbatches have their backward split, and whether there is any: without one nothing
  // outlives the forward.
  TorchStage(std::int32_t index, bool is_first, bool is_last, bool fused_weight_grad, const RankProgram& program);

  void bind(StageCalls calls) {
    calls_ = std::move(calls);
    deferred_.reset();
  }
  // All its work goes there; forward and backward of a microbatch must be on one stream, as torch's engine takes the
  // forward's.
  void set_stream(const std::optional<c10::Stream>& stream) { stream_ = stream; }

  // Of the step that comes; null where nobody asks for them.
  void set_times(DeviceTimes* times) { times_ = times; }

  bool is_first() const override { return is_first_; }
  bool is_last() const override { return is_last_; }
  void forward(std::int32_t microbatch, const Payload* input) override;
  void backward(std::int32_t microbatch, const Payload* gradient) override;
  // All but what linears can leave for W.
  void backward_input(std::int32_t microbatch, const Payload* gradient) override;
  void backward_weight(std::int32_t microbatch) override;
  void run_collective(Op op, bool failed) override;
  bool can_overlap(const Stage& pair) const override;
  bool can_alternate(const Stage& pair) const override;
  bool exchanges() const override { return calls_.exchanges; }
  // By the modules' own method.
  bool fuse(std::int32_t microbatch, const Payload* input, Stage& pair, std::int32_t pair_microbatch,
            const Payload* gradient) override;
  void take(ChannelKind kind, std::int32_t microbatch, Payload& into) override;
  void begin_turn() override {
    if (stream_) turn_.emplace(*stream_);
  }
  void end_turn() noexcept override { turn_.reset(); }
  void release() noexcept override;

  std::int32_t index() const { return index_; }
  // WeightGradients::leaves() of the step, empty if not asked for; nullopt before its first I.
  const std::optional<std::vector<std::uintptr_t>>& deferred() const { return deferred_; }
  // Whether a backward has found a gradient of an input; nullopt if no input required one.
  std::optional<bool> reaches_inputs() const { return reaches_inputs_; }
  // The most memory that waited for W at any time.
  std::size_t peak_held_bytes() const { return peak_held_bytes_; }

 private:
  using Tensors = std::vector<at::Tensor>;

  struct Record {
    Tensors inputs;   // those that require a gradient
    NodePtr entry;    // where they enter the graph
    Tensors outputs;  // until they are handed on; on the last stage until the backward
    // Of the outputs that require a gradient. The edge keeps the graph; the output's own memory may go once it is sent.
    EdgeList roots;
    Tensors kept;  // the outputs that require a gradient, where the modules' own method may want them
    Tensors gradients;
    std::shared_ptr<WeightGradients> weights;  // where the backward is split
    std::size_t held_bytes = 0;                // between I and W

    // The backward for inputs is over, or will not come.
    void drop_graph() noexcept;
  };

  bool excludes(const TorchStage& pair) const;
  void enter_graph(Record& record, const Tensors& inputs);
  static void split(const Record& record);
  using Call = FunctionRef<py::object(const Tensors&)>;

  // Its span begins when the stream has what the action is given.
  Timed timed(Op op, std::int32_t microbatch, const Payload* given) const;
  template <typename Body>
  void backwards(Op op, std::int32_t microbatch, const Body& body) const;
  void differentiate(std::int32_t microbatch, const Payload* gradient);
  void differentiate_inputs(std::int32_t microbatch, const Payload* gradient);
  void run(Record& record, Arming::Phase phase, std::int32_t microbatch, const Payload* input, Call call);
  void take_outputs(std::int32_t microbatch, const py::object& result, Tensors& outputs) const;
  const Tensors& gradients_for(std::int32_t microbatch, const Record& record, const Payload* gradient);
  void end(Record& record);
  const Tensors& root_gradients(std::int32_t microbatch, const Record& record);
  Tensors given_gradients(std::int32_t microbatch, const Record& record) const;
  std::string place(std::int32_t microbatch) const;

  std::int32_t index_;
  bool is_first_;
  bool is_last_;
  bool keeps_graph_;
  StageCalls calls_;
  std::optional<c10::Stream> stream_;
  std::optional<c10::StreamGuard> turn_;
  Fence fused_;  // between the two stages of a pair that runs by the modules' own method
  DeviceTimes* times_ = nullptr;
  std::vector<Record> records_;  // by microbatch
  // Of the forward that runs, and of the backward that runs: kept for their memory.
  Tensors entered_;
  Tensors root_gradients_;
  std::optional<std::vector<std::uintptr_t>> deferred_;
  std::optional<bool> reaches_inputs_;
  std::size_t held_bytes_ = 0;
  std::size_t peak_held_bytes_ = 0;
};

}  // namespace fastpipe
