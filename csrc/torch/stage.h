// A stage whose forward is a Python callable and whose backward is torch's engine.
#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <vector>

#include "core/stage.h"
#include "entry.h"
#include "payload.h"

namespace fastpipe {

// What Python gives for one step. Handles: the caller of the step keeps the objects alive.
struct StageCalls {
  py::handle run;           // (microbatch, tuple of tensors) -> tuple of tensors
  py::handle output_grads;  // (microbatch) -> tuple of tensors or None, or None; null where the root is a loss
};

class TorchStage final : public Stage {
 public:
  // keeps_graph: false in a program without backward, where nothing outlives the forward.
  TorchStage(std::int32_t index, bool is_first, bool is_last, std::int32_t num_microbatches, bool keeps_graph);

  void bind(StageCalls calls) { calls_ = calls; }

  bool is_first() const override { return is_first_; }
  bool is_last() const override { return is_last_; }
  void forward(std::int32_t microbatch, const Payload* input) override;
  void backward(std::int32_t microbatch, const Payload* gradient) override;
  // Without deferred weight gradients the engine does both at once; what W would do is done in I.
  void backward_input(std::int32_t microbatch, const Payload* gradient) override { backward(microbatch, gradient); }
  void backward_weight(std::int32_t) override {}
  void take(ChannelKind kind, std::int32_t microbatch, Payload& into) override;
  void release() noexcept override;

 private:
  using Tensors = std::vector<at::Tensor>;

  struct Record {
    Tensors inputs;   // those that require a gradient
    NodePtr entry;    // where they enter the graph
    Tensors outputs;  // until they are handed on; on the last stage until the backward
    // Of the outputs that require a gradient. The edge keeps the graph; the output's own memory may go once it is sent.
    torch::autograd::edge_list roots;
    Tensors gradients;
  };

  Tensors enter_graph(Record& record, const Tensors& inputs) const;
  Tensors call(std::int32_t microbatch, const Tensors& inputs) const;
  Tensors root_gradients(std::int32_t microbatch, const Record& record) const;
  Tensors given_gradients(std::int32_t microbatch, const Record& record) const;
  std::string place(std::int32_t microbatch) const;

  std::int32_t index_;
  bool is_first_;
  bool is_last_;
  bool keeps_graph_;
  StageCalls calls_;
  std::vector<Record> records_;  // by microbatch
};

}  // namespace fastpipe
