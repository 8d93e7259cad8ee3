#include "linear_node.h"

#include <torch/csrc/autograd/functions/utils.h>

#include <utility>

#include "weight_grad.h"

namespace fastpipe {

namespace {

// As autograd asks it of an operand of mm: the gradient is then computed transposed.
bool by_columns(std::int64_t rows, std::int64_t first_stride, std::int64_t second_stride) {
  return first_stride == 1 && second_stride == rows;
}

// As torch's collect_next_edges(), whose list grows edge by edge.
torch::autograd::edge_list next_edges_of(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias) {
  torch::autograd::edge_list edges;
  edges.reserve(3);
  for (const at::Tensor* const tensor : {&input, &weight, &bias}) {
    edges.push_back(tensor->defined() ? torch::autograd::impl::gradient_edge(*tensor) : torch::autograd::Edge());
  }
  return edges;
}

}  // namespace

at::Tensor weight_gradient(const at::Tensor& input, const at::Tensor& gradient, bool by_rows) {
  return by_rows ? gradient.t().mm(input) : input.t().mm(gradient).t();
}

LinearNode::LinearNode(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                       std::shared_ptr<WeightGradients> later)
    : Node(next_edges_of(input, weight, bias)),
      rows_(input.size(0)),
      columns_(input.size(1)),
      input_by_columns_(by_columns(rows_, input.stride(0), input.stride(1))),
      weight_by_rows_(by_columns(weight.size(1), weight.stride(1), weight.stride(0))),
      later_(std::move(later)) {
  // Not in the order of autograd's own node: a checkpoint finds tensors by it, and where one run had this node and the
  // other autograd's, shapes tell it so.
  if (should_compute_output(kInput)) weight_ = torch::autograd::SavedVariable(weight, false);
  input_ = torch::autograd::SavedVariable(input, false);
}

void LinearNode::defer() {
  weight_edge_ = std::exchange(next_edges()[kWeight], {});
}

torch::autograd::variable_list LinearNode::apply(torch::autograd::variable_list&& gradients) {
  torch::autograd::variable_list results(3);
  const at::Tensor gradient = std::move(gradients[0]);
  if (!gradient.defined()) return results;
  if (task_should_compute_output(kInput)) results[kInput] = input_gradient(gradient);
  if (deferred()) {
    later_->add(weight_edge_, sequence_nr(), {input_.unpack(), gradient, weight_by_rows_});
  } else if (task_should_compute_output(kWeight)) {
    results[kWeight] = weight_gradient(input_.unpack(), gradient, weight_by_rows_);
  }
  // the engine sums over the rows, as it does for a bias of addmm
  if (task_should_compute_output(kBias)) results[kBias] = gradient;
  return results;
}

at::Tensor LinearNode::input_gradient(const at::Tensor& gradient) const {
  const at::Tensor weight = weight_.unpack();
  return input_by_columns_ ? weight.t().mm(gradient.t()).t() : gradient.mm(weight);
}

void LinearNode::release_variables() {
  input_.reset_data();
  weight_.reset_data();
}

}  // namespace fastpipe
