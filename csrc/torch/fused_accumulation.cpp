#include "weight_grad.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <algorithm>
#include <typeinfo>

namespace fastpipe {

namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;

bool is_watched(Node& node) {
  return !node.pre_hooks().empty() || !node.post_hooks().empty() || !node.tensor_pre_hooks().empty() ||
         !node.retains_grad_hooks().empty();
}

// The parameter's node; null where what leads there is more than a cast, as autocast makes one.
AccumulateGrad* leaf_of(const torch::autograd::Edge& weight) {
  Node* node = weight.function.get();
  if (typeid(*node) == typeid(torch::autograd::generated::ToCopyBackward0) && !is_watched(*node)) {
    node = node->next_edge(0).function.get();
  }
  auto* leaf = dynamic_cast<AccumulateGrad*>(node);
  return leaf != nullptr && !is_watched(*leaf) ? leaf : nullptr;
}

// Of a product of two 16-bit matrices that is added to a matrix of 32 bits: cuBLAS has it.
bool widens(const at::Tensor& sum, const at::Tensor& operand) {
  const bool narrow = operand.scalar_type() == at::kBFloat16 || operand.scalar_type() == at::kHalf;
  return narrow && sum.scalar_type() == at::kFloat && sum.is_cuda();
}

bool fits(const at::Tensor& sum, const WeightUse& use) {
  const at::Tensor& gradient = use.gradient;
  const bool same_shape = sum.dim() == 2 && sum.size(0) == gradient.size(1) && sum.size(1) == use.input.size(1);
  const bool same_dtype = sum.scalar_type() == gradient.scalar_type() || widens(sum, gradient);
  return same_shape && same_dtype && sum.device() == gradient.device();
}

void add_product(at::Tensor& sum, const WeightUse& use) {
  if (widens(sum, use.gradient)) {
    at::addmm_outf(sum, use.gradient.t(), use.input, at::kFloat, 1, 1, sum);
  } else {
    sum.addmm_(use.gradient.t(), use.input);
  }
}

}  // namespace

bool accumulate_in_place(const torch::autograd::Edge& weight, const WeightUses& uses) {
  AccumulateGrad* const leaf = leaf_of(weight);
  if (leaf == nullptr) return false;
  at::Tensor& sum = leaf->variable.mutable_grad();
  if (!sum.defined() || sum.layout() != at::kStrided || sum.requires_grad() || !sum.is_non_overlapping_and_dense()) {
    return false;
  }
  if (!std::all_of(uses.begin(), uses.end(), [&](const WeightUse& use) { return fits(sum, use); })) return false;
  const c10::AutoGradMode without_graph(false);
  for (const WeightUse& use : uses) {
    use.require_unchanged();
    add_product(sum, use);
  }
  const auto& hook = leaf->tensor_post_acc_grad_hooks();
  if (hook != nullptr) (*hook)(leaf->variable);
  return true;
}

}  // namespace fastpipe
