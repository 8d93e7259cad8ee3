#include "weight_grad.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <algorithm>
#include <iterator>
#include <mutex>
#include <optional>
#include <typeinfo>
#include <utility>

namespace fastpipe {

namespace {

std::int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor._version();
}

void require_version(const at::Tensor& tensor, std::int64_t version, const char* what) {
  TORCH_CHECK(
      version_of(tensor) == version, "the ", what, " of a linear, ", tensor.toString(), " ", tensor.sizes(),
      ", was changed in place between I and W, which needs it for the weight's gradient: it is at version ",
      version_of(tensor), " instead of ", version,
      "; do not write to it again, clone it before the linear, or use a schedule that does not split backwards");
}

at::Tensor gradient_of(const WeightUse& use, std::optional<at::ScalarType> dtype) {
  use.require_unchanged();
  at::Tensor gradient = weight_gradient(use.input, use.gradient, use.weight_by_rows);
  return dtype ? gradient.to(*dtype) : gradient;
}

}  // namespace

WeightUse::WeightUse(at::Tensor input, at::Tensor gradient, bool weight_by_rows)
    : input(std::move(input)),
      gradient(std::move(gradient)),
      weight_by_rows(weight_by_rows),
      input_version(version_of(this->input)),
      gradient_version(version_of(this->gradient)) {}

void WeightUse::require_unchanged() const {
  require_version(input, input_version, "input");
  require_version(gradient, gradient_version, "output's gradient");
}

WeightSource::WeightSource(std::uint64_t sequence, Edge weight, WeightUses uses)
    : Node(sequence, {std::move(weight)}), uses_(std::move(uses)) {}

VariableList WeightSource::apply(VariableList&&) {
  const WeightUses uses = std::exchange(uses_, {});
  // The engine converts each gradient to the parameter's grad_dtype before it adds it to others.
  const Edge& weight = next_edge(0);
  const auto dtype = weight.function->input_metadata(weight.input_nr).grad_dtype();
  at::Tensor sum = gradient_of(uses.front(), dtype);
  for (std::size_t i = 1; i < uses.size(); ++i) sum.add_(gradient_of(uses[i], dtype));
  return {std::move(sum)};
}

namespace {

// The parameter's node; null where what leads there is more than a cast, as autocast makes one.
AccumulateGrad* leaf_of(const Edge& weight) {
  Node* node = weight.function.get();
  if (is_cast(*node) && !is_watched(*node)) {
    node = node->next_edge(0).function.get();
  }
  AccumulateGrad* const leaf = as_leaf(node);
  return leaf != nullptr && !is_watched(*leaf) ? leaf : nullptr;
}

// Of a product of two 16-bit matrices that is added to a matrix of 32 bits: cuBLAS has it.
bool widens(const at::Tensor& sum, const at::Tensor& operand) {
  const bool narrow = operand.scalar_type() == at::kBFloat16 || operand.scalar_type() == at::kHalf;
  return narrow && sum.scalar_type() == at::kFloat && sum.is_cuda();
}

bool can_add(const at::Tensor& sum, const WeightUse& use) {
  const at::Tensor& gradient = use.gradient;
  const bool same_shape = sum.dim() == 2 && sum.size(0) == gradient.size(1) && sum.size(1) == use.input.size(1);
  const bool same_dtype = sum.scalar_type() == gradient.scalar_type() || widens(sum, gradient);
  return same_shape && same_dtype && sum.device() == gradient.device() && !is_subclass(sum) && !is_subclass(gradient);
}

void add_product(at::Tensor& sum, const WeightUse& use) {
  if (widens(sum, use.gradient)) {
    at::addmm_outf(sum, use.gradient.t(), use.input, at::kFloat, 1, 1, sum);
  } else {
    sum.addmm_(use.gradient.t(), use.input);
  }
}

}  // namespace

bool accumulate_in_place(const Edge& weight, const WeightUses& uses) {
  AccumulateGrad* const leaf = leaf_of(weight);
  if (leaf == nullptr || !adds_on_current_stream(*leaf)) return false;
  std::unique_lock<std::mutex> alone = lock(*leaf);
  at::Tensor& sum = grad_of(*leaf);
  if (!sum.defined() || sum.layout() != at::kStrided || sum.requires_grad() || !sum.is_non_overlapping_and_dense()) {
    return false;
  }
  if (!std::all_of(uses.begin(), uses.end(), [&](const WeightUse& use) { return can_add(sum, use); })) return false;
  const c10::AutoGradMode without_graph(false);
  for (const WeightUse& use : uses) {
    use.require_unchanged();
    add_product(sum, use);
  }
  alone.unlock();
  run_post_accumulate_hooks(*leaf);
  return true;
}

namespace {

// As autograd asks it of an operand of mm: the gradient is then computed transposed.
bool by_columns(std::int64_t rows, std::int64_t first_stride, std::int64_t second_stride) {
  return first_stride == 1 && second_stride == rows;
}

// As torch's collect_next_edges(), whose list grows edge by edge.
EdgeList next_edges_of(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias) {
  EdgeList edges;
  edges.reserve(3);
  for (const at::Tensor* const tensor : {&input, &weight, &bias}) {
    edges.push_back(tensor->defined() ? gradient_edge(*tensor) : Edge());
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
  if (should_compute_output(kInput)) weight_ = SavedVariable(weight, false);
  input_ = SavedVariable(input, false);
}

void LinearNode::defer() {
  weight_edge_ = std::exchange(next_edges()[kWeight], {});
}

VariableList LinearNode::apply(VariableList&& gradients) {
  VariableList results(3);
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

namespace {

// Not of a linear whose weight waits: that edge is no part of I.
bool leads_on(const Node& node, std::size_t edge) {
  return edge != LinearNode::kWeight || typeid(node) != typeid(LinearNode);
}

bool is_leaf(const Edge& edge) {
  return as_leaf(edge.function.get()) != nullptr;
}

// Whether `holds` is true of all nodes to which these lead; it is not asked any more once it is not.
template <typename Condition>
bool all_nodes(std::vector<Node*> stack, const Condition& holds) {
  FlatSet<Node*> seen;
  while (!stack.empty()) {
    Node* const node = stack.back();
    stack.pop_back();
    if (node == nullptr || !seen.insert(node).second) continue;
    if (!holds(node)) return false;
    for (const Edge& edge : node->next_edges()) stack.push_back(edge.function.get());
  }
  return true;
}

std::vector<AccumulateGrad*> leaves_of(std::vector<Node*> nodes) {
  std::vector<AccumulateGrad*> found;
  all_nodes(std::move(nodes), [&](Node* node) {
    if (AccumulateGrad* const leaf = as_leaf(node)) found.push_back(leaf);
    return true;
  });
  return found;
}

}  // namespace

void WeightGradients::created(LinearPtr linear) {
  in_checkpoint_ = in_checkpoint_ || in_checkpoint();
  linears_.push_back(std::move(linear));
}

void WeightGradients::split(const EdgeList& outputs, c10::ArrayRef<Node*> inputs) {
  kept_.insert(inputs.begin(), inputs.end());
  for (const Edge& output : outputs) keep(output.function.get());
  keep_shared();
  for (const LinearPtr& linear : linears_) {
    if (kept_.count(linear.get()) == 0 || kept_.count(linear->weight_edge().function.get()) != 0) continue;
    linear->defer();
    if (in_checkpoint_ && !group_ && !is_leaf(linear->weight_edge())) group_.emplace();
  }
  linears_.clear();
  in_checkpoint_ = false;
}

// All that I reaches from this node.
void WeightGradients::keep(Node* node) {
  stack_.push_back(node);
  while (!stack_.empty()) {
    Node* const next = stack_.back();
    stack_.pop_back();
    if (next == nullptr || !kept_.insert(next).second) continue;
    const EdgeList& edges = next->next_edges();
    for (std::size_t i = 0; i < edges.size(); ++i) {
      if (leads_on(*next, i)) stack_.push_back(edges[i].function.get());
    }
  }
}

// A weight that I reaches is whole; what it is made of is then reached as well, and may be another weight's.
void WeightGradients::keep_shared() {
  for (bool found = true; found;) {
    found = false;
    for (const LinearPtr& linear : linears_) {
      const Edge& weight = linear->weight_edge();
      if (kept_.count(weight.function.get()) != 0 || separate(weight)) continue;
      keep(weight.function.get());
      found = true;
    }
  }
}

bool WeightGradients::separate(const Edge& weight) const {
  // A parameter by itself, as most weights are.
  if (kept_.count(weight.function.get()) != 0) return false;
  if (is_leaf(weight)) return true;
  // an end that is no parameter is somebody's own and expects its gradient in I
  return all_nodes({weight.function.get()}, [&](Node* node) {
    return kept_.count(node) == 0 && (node->num_outputs() != 0 || as_leaf(node) != nullptr);
  });
}

// The checkpoint's inputs are leaves of the graph made anew, and their gradients are wanted at once. What a checkpoint
// within it makes, W would make again: it is too late to have this run of the engine in a group.
bool WeightGradients::may_wait_recomputed(const Edge& weight) const {
  if (!separate(weight) || (in_checkpoint() && !is_leaf(weight))) return false;
  const auto leaves = leaves_of({weight.function.get()});
  return std::all_of(leaves.begin(), leaves.end(),
                     [](const AccumulateGrad* leaf) { return is_parameter(tensor_of(*leaf)); });
}

void WeightGradients::add(const Edge& weight, std::uint64_t sequence, WeightUse use) {
  const int task = current_engine_run();
  auto place = pending_.end();
  for (auto it = pending_.begin(); it != pending_.end(); ++it) {
    if (it->task != task) continue;
    place = std::next(it);
    if (it->weight != weight) continue;
    it->sequence = sequence;
    it->uses.push_back(std::move(use));
    return;
  }
  pending_.insert(place, {weight, task, sequence, {std::move(use)}});
}

void WeightGradients::compute() {
  for (std::size_t first = 0; first < pending_.size();) {
    std::size_t last = first;
    while (last < pending_.size() && pending_[last].task == pending_[first].task) ++last;
    run(first, last);
    first = last;
  }
  clear();
}

// One run of the engine: weights made of the same parameter are summed before they are added to it.
void WeightGradients::run(std::size_t first, std::size_t last) {
  roots_.clear();
  starts_.clear();
  for (std::size_t i = first; i < last; ++i) {
    Pending& pending = pending_[i];
    if (fused_ && accumulate_in_place(pending.weight, pending.uses)) continue;
    const at::Tensor& like = pending.uses.front().gradient;
    if (starts_.empty() || starts_.back().device() != like.device()) {
      starts_.push_back(like.new_empty({0}));
    } else {
      starts_.push_back(starts_.back());
    }
    const auto source = make_node<WeightSource>(pending.sequence, std::move(pending.weight), std::move(pending.uses));
    roots_.emplace_back(source, source->add_input_metadata(starts_.back()));
  }
  if (!roots_.empty()) run_engine(roots_, starts_);
}

void WeightGradients::clear() noexcept {
  linears_.clear();
  in_checkpoint_ = false;
  group_.reset();
  kept_.clear();
  stack_.clear();
  pending_.clear();
  roots_.clear();
  starts_.clear();
}

std::size_t WeightGradients::held_bytes() {
  storages_.clear();
  std::size_t bytes = 0;
  const auto add = [&](const at::Tensor& tensor) {
    const at::Tensor local = is_subclass(tensor) ? local_shard(tensor) : tensor;
    const c10::Storage& storage = local.storage();
    if (storages_.insert(storage.unsafeGetStorageImpl()).second) bytes += storage.nbytes();
  };
  for (const Pending& pending : pending_) {
    for (const WeightUse& use : pending.uses) {
      add(use.input);
      add(use.gradient);
    }
  }
  return bytes;
}

std::vector<std::uintptr_t> WeightGradients::leaves() const {
  std::vector<Node*> weights;
  for (const Pending& pending : pending_) weights.push_back(pending.weight.function.get());
  std::vector<std::uintptr_t> found;
  for (const AccumulateGrad* leaf : leaves_of(std::move(weights))) {
    found.push_back(reinterpret_cast<std::uintptr_t>(tensor_of(*leaf).unsafeGetTensorImpl()));
  }
  return found;
}

Arming::Arming(std::shared_ptr<WeightGradients> weights, Phase phase)
    : weights_(std::move(weights)), phase_(phase), note_(NoteKind::kArming, *this) {
  if (phase_ == Phase::kBackward && weights_->group()) group_.emplace(*weights_->group());
}

const Arming* Arming::current() {
  return static_cast<const Arming*>(ThreadNote::find(NoteKind::kArming));
}

// aten::linear at the autograd keys: below autocast, above the composite. It does what the composite does; where a
// stage's F has armed the thread, the node it leaves in the graph is a LinearNode.

namespace {

bool matches(const at::Tensor& tensor, const at::Tensor& weight) {
  return is_plain(tensor) && is_subclass(tensor) == is_subclass(weight) &&
         tensor.scalar_type() == weight.scalar_type() && tensor.device() == weight.device();
}

// What is wrong or rare is left to the composite, with its messages.
bool fits(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias) {
  if (!weight.requires_grad() || weight.dim() != 2 || input.dim() < 1 || input.size(-1) != weight.size(1)) return false;
  if (!is_plain(weight) || !at::isFloatingType(weight.scalar_type()) || !matches(input, weight)) return false;
  // the composite adds a bias that is not contiguous after the product
  if (bias.defined() && (bias.dim() != 1 || !bias.is_contiguous() || bias.size(0) != weight.size(0))) return false;
  return !bias.defined() || matches(bias, weight);
}

// Reentrant checkpointing runs the graph that it makes anew, in an engine of its own. Any other graph made in I is
// either thrown away, or run by a user who may ask it for the weight's gradient: there linears are whole.
bool may_wait_in_backward(const WeightGradients& weights, const at::Tensor& weight) {
  return in_reentrant_checkpoint() && weights.may_wait_recomputed(gradient_edge(weight));
}

at::Tensor multiply(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, const Arming& arming) {
  const auto node = make_node<LinearNode>(input, weight, bias, arming.weights());
  at::Tensor output;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    output = bias.defined() ? at::addmm(bias, input, weight.t()) : at::mm(input, weight.t());
  }
  attach(output, node);
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
  if (bias.defined() && input.is_contiguous()) {
    return multiply(rows_of, weight, bias, arming).view(sizes);
  }
  at::Tensor output = at::_unsafe_view(multiply(rows_of, weight, {}, arming), sizes);
  return bias.defined() ? output.add_(bias) : output;
}

at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const Arming* const arming = Arming::current();
  if (arming == nullptr || !c10::GradMode::is_enabled() || is_tracing()) return composite_linear(input, weight, bias);
  if (arming->phase() == Arming::Phase::kFused && in_engine()) return composite_linear(input, weight, bias);
  const at::Tensor added = bias.value_or(at::Tensor());
  if (!fits(input, weight, added)) return composite_linear(input, weight, bias);
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
