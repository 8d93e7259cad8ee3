#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/linear_native.h>
#include <ATen/ops/mm.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <optional>
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

// aten::linear at the autograd keys: below autocast, above the composite. It does what the composite does; where a
// stage's F has armed the thread, the node it leaves in the graph is a LinearNode.

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

// Plain tensors have no other key: not fake, functional, batched, quantized, a subclass with a dispatch of its own.
// PrivateUse1 is a device that torch does not know; who has one may call this kernel from there.
const DispatchKeySet kPlain({DispatchKey::CPU, DispatchKey::CUDA, DispatchKey::PrivateUse1,
                             DispatchKey::ADInplaceOrView, DispatchKey::AutogradCPU, DispatchKey::AutogradCUDA,
                             DispatchKey::AutogradPrivateUse1, DispatchKey::AutocastCPU, DispatchKey::AutocastCUDA,
                             DispatchKey::AutocastPrivateUse1});
// Of a thread: what traces or transforms. A graph that is traced now runs later, and elsewhere.
const DispatchKeySet kTracing({DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::PreDispatch,
                               DispatchKey::Functionalize, DispatchKey::FuncTorchDynamicLayerFrontMode,
                               DispatchKey::FuncTorchDynamicLayerBackMode, DispatchKey::FuncTorchVmapMode,
                               DispatchKey::Tracer});

bool tracing() {
  return c10::impl::TorchDispatchModeTLS::any_modes_set() ||
         c10::impl::tls_local_dispatch_key_set().included_.has_any(kTracing);
}

bool plain(const at::Tensor& tensor) {
  return (tensor.key_set().raw_repr() & ~kPlain.raw_repr()) == 0 && tensor.layout() == at::kStrided &&
         !tensor._fw_grad(0).defined();
}

bool alike(const at::Tensor& tensor, const at::Tensor& weight) {
  return plain(tensor) && tensor.scalar_type() == weight.scalar_type() && tensor.device() == weight.device();
}

// What is wrong or rare is left to the composite, with its messages.
bool fits(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias) {
  if (!weight.requires_grad() || weight.dim() != 2 || input.dim() < 1 || input.size(-1) != weight.size(1)) return false;
  if (!plain(weight) || !at::isFloatingType(weight.scalar_type()) || !alike(input, weight)) return false;
  return !bias.defined() || (bias.dim() == 1 && bias.size(0) == weight.size(0) && alike(bias, weight));
}

// Reentrant checkpointing runs the graph that it makes anew, in an engine of its own. Any other graph made in I is
// either thrown away, or run by somebody who may ask it for the weight's gradient: there linears are whole.
bool may_wait_in_backward(const WeightGradients& weights, const at::Tensor& weight) {
  const auto node = torch::autograd::get_current_node();
  return node && node->name() == "CheckpointFunctionBackward" &&
         weights.may_wait_recomputed(torch::autograd::impl::gradient_edge(weight));
}

at::Tensor multiply(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, const Arming& arming) {
  const auto node = make_node<LinearNode>(input, weight, bias, arming.weights());
  at::Tensor output;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    output = bias.defined() ? at::addmm(bias, input, weight.t()) : at::mm(input, weight.t());
  }
  torch::autograd::set_history(output, node);
  if (arming.phase() != Arming::Phase::kBackward) {
    arming.weights()->created(node);
  } else if (may_wait_in_backward(*arming.weights(), weight)) {
    node->defer();
  }
  return output;
}

// More dimensions, or one, become two, by operators that have the bits of those that the composite uses.
at::Tensor flattened(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, const Arming& arming) {
  auto sizes = input.sizes().vec();
  const std::int64_t rows = c10::multiply_integers(sizes.begin(), sizes.end() - 1);
  const at::Tensor rows_of = input.reshape({rows, sizes.back()});
  sizes.back() = weight.size(0);
  if (bias.defined() && input.dim() == 3 && input.is_contiguous()) {
    return multiply(rows_of, weight, bias, arming).view(sizes);
  }
  at::Tensor output = at::_unsafe_view(multiply(rows_of, weight, {}, arming), sizes);
  return bias.defined() ? output.add_(bias) : output;
}

at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const Arming* const arming = Arming::current();
  if (arming == nullptr || !at::GradMode::is_enabled() || tracing()) return at::native::linear(input, weight, bias);
  const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
  if (arming->phase() == Arming::Phase::kFused && in_backward) return at::native::linear(input, weight, bias);
  const at::Tensor added = bias.value_or(at::Tensor());
  if (!fits(input, weight, added)) return at::native::linear(input, weight, bias);
  return input.dim() == 2 ? multiply(input, weight, added, *arming) : flattened(input, weight, added, *arming);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, AutogradCPU, library) {
  library.impl("linear", TORCH_FN(linear));
}

TORCH_LIBRARY_IMPL(aten, AutogradCUDA, library) {
  library.impl("linear", TORCH_FN(linear));
}

}  // namespace fastpipe
