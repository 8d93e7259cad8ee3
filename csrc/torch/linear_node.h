// The backward of one linear whose weight gradient may wait for W.
#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <string>

#include "node.h"

namespace fastpipe {

class WeightGradients;

// Of out = addmm(bias, input, weight.t()), or mm(input, weight.t()) without a bias; the input has two dimensions.
// Next edges: input, weight, bias. Its formulas are autograd's own for addmm and mm, so the bits are too.
class LinearNode final : public torch::autograd::Node {
 public:
  LinearNode(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
             std::shared_ptr<WeightGradients> later);

  // From now on the weight's gradient is no longer this node's to give: the engine must not wait for it, nor call the
  // weight's hooks without one.
  void defer();
  bool deferred() const { return weight_edge_.is_valid(); }
  const torch::autograd::Edge& weight_edge() const { return deferred() ? weight_edge_ : next_edges()[kWeight]; }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  void release_variables() override;
  std::string name() const override { return "fastpipe::LinearBackward"; }

  static constexpr std::size_t kInput = 0;
  static constexpr std::size_t kWeight = 1;
  static constexpr std::size_t kBias = 2;

 private:
  at::Tensor input_gradient(const at::Tensor& gradient) const;

  torch::autograd::SavedVariable input_;
  torch::autograd::SavedVariable weight_;
  std::int64_t rows_;
  std::int64_t columns_;
  bool input_by_columns_;
  bool weight_by_rows_;
  torch::autograd::Edge weight_edge_;  // once it is deferred
  std::shared_ptr<WeightGradients> later_;
};

// The gradient of a weight by one use. by_rows: the weight's own memory is laid out row after row.
at::Tensor weight_gradient(const at::Tensor& input, const at::Tensor& gradient, bool by_rows);

}  // namespace fastpipe
