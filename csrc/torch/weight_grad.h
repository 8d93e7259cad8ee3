// Weight gradients that wait for W: what a linear leaves in the graph, and what computes it later.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "torch_private.h"

namespace fastpipe {

// What one linear leaves for W.
struct WeightUse {
  WeightUse(at::Tensor input, at::Tensor gradient, bool weight_by_rows);

  // Throws if one of them has been changed in place since: a whole backward would have read it before.
  void require_unchanged() const;

  at::Tensor input;
  at::Tensor gradient;  // of the output
  bool weight_by_rows;
  std::int64_t input_version;
  std::int64_t gradient_version;
};
// A weight has one use in most models.
using WeightUses = c10::SmallVector<WeightUse, 1>;

// Where a weight's deferred gradient enters the graph.
// Computes only when the engine comes to it, and hands its result on without keeping it: as many gradients are alive
// at a time as in a whole backward, and `.grad` takes over the very memory.
class WeightSource final : public Node {
 public:
  // sequence: the place in the order of the forward that its linear had.
  WeightSource(std::uint64_t sequence, Edge weight, WeightUses uses);

  VariableList apply(VariableList&&) override;

 private:
  WeightUses uses_;
};

// Adds what the uses of one weight make to its parameter's gradient, by the matrix products that make it. False, and
// nothing done, where that is for the engine: no gradient to add to yet, one of another layout, a weight that is more
// than a parameter or its copy in another dtype, hooks that want to see a contribution, operands of 16 bits where no
// product adds to 32, or a weight that a stage before uses, too, on its own stream. Post-accumulate hooks run. Without
// the GIL.
bool accumulate_in_place(const Edge& weight, const WeightUses& uses);

class WeightGradients;

// The backward of one linear whose weight gradient may wait for W: of out = addmm(bias, input, weight.t()), or
// mm(input, weight.t()) without a bias; the input has two dimensions. Next edges: input, weight, bias. Its formulas are
// autograd's own for addmm and mm, so the bits are too.
class LinearNode final : public Node {
 public:
  LinearNode(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
             std::shared_ptr<WeightGradients> later);

  // From now on the weight's gradient is no longer this node's to give: the engine must not wait for it, nor call the
  // weight's hooks without one.
  void defer();
  bool deferred() const { return weight_edge_.is_valid(); }
  const Edge& weight_edge() const { return deferred() ? weight_edge_ : next_edges()[kWeight]; }

  VariableList apply(VariableList&& gradients) override;
  void release_variables() override;
  std::string name() const override { return "fastpipe::LinearBackward"; }

  static constexpr std::size_t kInput = 0;
  static constexpr std::size_t kWeight = 1;
  static constexpr std::size_t kBias = 2;

 private:
  at::Tensor input_gradient(const at::Tensor& gradient) const;

  SavedVariable input_;
  SavedVariable weight_;
  std::int64_t rows_;
  std::int64_t columns_;
  bool input_by_columns_;
  bool weight_by_rows_;
  Edge weight_edge_;  // once it is deferred
  std::shared_ptr<WeightGradients> later_;
};

// The gradient of a weight by one use. by_rows: the weight's own memory is laid out row after row.
at::Tensor weight_gradient(const at::Tensor& input, const at::Tensor& gradient, bool by_rows);

// The weight gradients of one microbatch of one stage, between its F, its I and its W.
// F: every linear becomes a LinearNode, whole. When F has ended, the graph tells which weights reach it by linears
// alone; these linears are deferred. I queues their inputs and output gradients; W computes, and enters the graph at
// the weights. (A linear that makes another's weight is whole: W comes to it through that weight.) Nothing is
// remembered from one microbatch to the next, so a model may change as it likes.
class WeightGradients {
 public:
  // fused: W adds to `.grad` by the matrix products themselves, where that can be.
  explicit WeightGradients(bool fused) : fused_(fused) {}

  using LinearPtr = SharedNode<LinearNode>;

  // In F: a linear has entered the graph.
  void created(LinearPtr linear);
  // At the end of F. `inputs`: where the stage's inputs enter; what depends on them can not wait.
  void split(const EdgeList& outputs, c10::ArrayRef<Node*> inputs);
  // In I, for a linear that a reentrant checkpoint recomputes: whether its weight may wait.
  bool may_wait_recomputed(const Edge& weight) const;
  // For I and W: there is one if a weight that waits is made of parameters, and may be recomputed.
  const std::optional<RecomputeGroup>& group() const { return group_; }
  // In I.
  void add(const Edge& weight, std::uint64_t sequence, WeightUse use);
  // W.
  void compute();
  // Lets go of all, after a failure or a forward that was given up.
  void clear() noexcept;

  // The memory that waits for W.
  std::size_t held_bytes();
  // The leaves whose gradients wait for W, parameters as a rule: names only (Python's `_cdata`), which keep nothing
  // alive.
  std::vector<std::uintptr_t> leaves() const;

 private:
  struct Pending {
    Edge weight;
    int task;  // the engine's run: what a nested one found is added to `.grad` by itself, and so it is here
    std::uint64_t sequence;
    WeightUses uses;
  };

  void keep(Node* node);
  void keep_shared();
  bool separate(const Edge& weight) const;
  void run(std::size_t first, std::size_t last);

  bool fused_;
  std::vector<LinearPtr> linears_;
  bool in_checkpoint_ = false;  // a linear of this F was
  std::optional<RecomputeGroup> group_;
  FlatSet<Node*> kept_;  // the nodes that I goes through
  std::vector<Node*> stack_;
  std::vector<Pending> pending_;  // those of one run of the engine side by side
  // Kept for their memory.
  EdgeList roots_;
  std::vector<at::Tensor> starts_;
  FlatSet<const void*> storages_;
};

// While one exists, linears of this thread, and of the engine's threads that work for it, may defer their weights.
class Arming final : public ThreadNote::Noted {
 public:
  // kFused: a forward in which another microbatch's backward runs. What that recomputes was not armed in its forward,
  // and must not be now: a checkpoint takes what is saved by its order.
  enum class Phase { kForward, kBackward, kFused };

  Arming(std::shared_ptr<WeightGradients> weights, Phase phase);

  // What this thread is armed with; null when it is not.
  static const Arming* current();

  Phase phase() const { return phase_; }
  const std::shared_ptr<WeightGradients>& weights() const { return weights_; }

 private:
  std::shared_ptr<WeightGradients> weights_;
  Phase phase_;
  std::optional<InRecomputeGroup> group_;  // in I and W
  ThreadNote note_;
};

}  // namespace fastpipe
