#include "graph.h"

#include <ATen/SavedTensorHooks.h>
#include <c10/core/AutogradState.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>

#include "python_errors.h"

namespace fastpipe {

NodePtr Entry::make() {
  return make_node<Entry>();
}

torch::autograd::variable_list Entry::apply(torch::autograd::variable_list&& gradients) {
  caught_ = std::move(gradients);
  return {};
}

at::Tensor enter(const at::Tensor& tensor, const NodePtr& entry) {
  at::Tensor entered = tensor.detach();
  torch::autograd::create_gradient_edge(entered, entry);
  return entered;
}

void run_engine(const torch::autograd::edge_list& roots, const std::vector<at::Tensor>& gradients) {
  constexpr bool kKeepGraph = false;
  constexpr bool kCreateGraph = false;
  constexpr bool kAccumulate = true;
  try {
    torch::autograd::Engine::get_default_engine().execute(roots, gradients, kKeepGraph, kCreateGraph, kAccumulate);
  } catch (python_error& error) {
    rethrow_for_pybind(error);
  }
}

namespace {

c10::SafePyObject make_group() {
  const py::gil_scoped_acquire gil;
  return {py::module_::import("torch.utils.checkpoint").attr("GraphExecGroup")().release().ptr(), getPyInterpreter()};
}

}  // namespace

bool in_checkpoint() {
  return !at::SavedTensorDefaultHooks::get_tls_state().stack.empty();
}

RecomputeGroup::RecomputeGroup() : object_(make_group()) {}

InRecomputeGroup::InRecomputeGroup(const RecomputeGroup& group)
    : before_(c10::AutogradState::get_tls_state().get_graph_exec_group()) {
  c10::AutogradState::get_tls_state().set_graph_exec_group(group.object());
}

InRecomputeGroup::~InRecomputeGroup() {
  c10::AutogradState::get_tls_state().set_graph_exec_group(std::move(before_));
}

Moment::Moment(const Step& step, Op op, std::int32_t stage, std::int32_t microbatch)
    : step_(step),
      op_(op),
      stage_(stage),
      microbatch_(microbatch),
      training_(op != Op::kF || c10::GradMode::is_enabled()),
      note_(c10::DebugInfoKind::TEST_INFO, *this) {}

const Moment* Moment::current() {
  return static_cast<const Moment*>(c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::TEST_INFO));
}

bool Moment::is_last_microbatch() const {
  const std::size_t kind = op_ == Op::kF ? 0 : op_ == Op::kW ? 2 : 1;
  return step_.last.at(kind) == microbatch_;
}

}  // namespace fastpipe
