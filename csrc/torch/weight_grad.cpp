#include "weight_grad.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <iterator>
#include <typeinfo>
#include <utility>

#include "graph.h"

namespace fastpipe {

namespace {

std::int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor._version();
}

void require_version(const at::Tensor& tensor, std::int64_t version, const char* what) {
  TORCH_CHECK(
      version_of(tensor) == version, "the ", what, " of a linear, ", tensor.toString(), " ", tensor.sizes(),
      ", was changed in place between I, which left it for the weight's gradient, and W: it is at version ",
      version_of(tensor), " instead of ", version,
      "; do not write to it again, clone it before the linear, or use a schedule that does not split backwards");
}

at::Tensor gradient_of(const WeightUse& use) {
  use.require_unchanged();
  return weight_gradient(use.input, use.gradient, use.weight_by_rows);
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

WeightSource::WeightSource(std::uint64_t sequence, torch::autograd::Edge weight, WeightUses uses)
    : Node(sequence, {std::move(weight)}), uses_(std::move(uses)) {}

torch::autograd::variable_list WeightSource::apply(torch::autograd::variable_list&&) {
  const WeightUses uses = std::exchange(uses_, {});
  at::Tensor sum = gradient_of(uses.front());
  for (std::size_t i = 1; i < uses.size(); ++i) sum.add_(gradient_of(uses[i]));
  return {std::move(sum)};
}

namespace {

using torch::autograd::AccumulateGrad;

// Not of a linear whose weight waits: that edge is no part of I.
bool leads_on(const torch::autograd::Node& node, std::size_t edge) {
  return edge != LinearNode::kWeight || typeid(node) != typeid(LinearNode);
}

bool is_leaf(const torch::autograd::Edge& edge) {
  return dynamic_cast<const AccumulateGrad*>(edge.function.get()) != nullptr;
}

std::vector<AccumulateGrad*> leaves_of(std::vector<torch::autograd::Node*> stack) {
  ska::flat_hash_set<torch::autograd::Node*> seen;
  std::vector<AccumulateGrad*> found;
  while (!stack.empty()) {
    torch::autograd::Node* const node = stack.back();
    stack.pop_back();
    if (node == nullptr || !seen.insert(node).second) continue;
    if (auto* const leaf = dynamic_cast<AccumulateGrad*>(node)) found.push_back(leaf);
    for (const auto& edge : node->next_edges()) stack.push_back(edge.function.get());
  }
  return found;
}

bool is_parameter(const AccumulateGrad* leaf) {
  const py::gil_scoped_acquire gil;
  const auto tensor = py::reinterpret_steal<py::object>(THPVariable_Wrap(leaf->variable));
  const int is = PyObject_IsInstance(tensor.ptr(), ParameterClass);
  if (is < 0) throw py::error_already_set();
  return is == 1;
}

}  // namespace

void WeightGradients::created(LinearPtr linear) {
  in_checkpoint_ = in_checkpoint_ || in_checkpoint();
  linears_.push_back(std::move(linear));
}

void WeightGradients::split(const Edges& outputs, c10::ArrayRef<Node*> inputs) {
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
    const Edges& edges = next->next_edges();
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
  std::vector<Node*> stack{weight.function.get()};
  ska::flat_hash_set<Node*> seen;
  while (!stack.empty()) {
    Node* const node = stack.back();
    stack.pop_back();
    if (node == nullptr || !seen.insert(node).second) continue;
    if (kept_.count(node) != 0) return false;
    // an end that is no parameter is somebody's own and expects its gradient in I
    if (node->num_outputs() == 0 && dynamic_cast<AccumulateGrad*>(node) == nullptr) return false;
    for (const Edge& edge : node->next_edges()) stack.push_back(edge.function.get());
  }
  return true;
}

// The checkpoint's inputs are leaves of the graph made anew, and their gradients are wanted at once. What a checkpoint
// within it makes, W would make again: it is too late to have this run of the engine in a group.
bool WeightGradients::may_wait_recomputed(const Edge& weight) const {
  if (!separate(weight) || (in_checkpoint() && !is_leaf(weight))) return false;
  const auto leaves = leaves_of({weight.function.get()});
  return std::all_of(leaves.begin(), leaves.end(), is_parameter);
}

void WeightGradients::add(const Edge& weight, std::uint64_t sequence, WeightUse use) {
  const int task = torch::autograd::get_current_graph_task_id();
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
    const c10::Storage& storage = tensor.storage();
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
    found.push_back(reinterpret_cast<std::uintptr_t>(leaf->variable.unsafeGetTensorImpl()));
  }
  return found;
}

Arming::Arming(std::shared_ptr<WeightGradients> weights, Phase phase)
    : weights_(std::move(weights)), phase_(phase), note_(c10::DebugInfoKind::TEST_INFO_2, *this) {
  if (phase_ == Phase::kBackward && weights_->group()) group_.emplace(*weights_->group());
}

const Arming* Arming::current() {
  return static_cast<const Arming*>(c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::TEST_INFO_2));
}

}  // namespace fastpipe
