#include "torch_private.h"

#include <c10/core/AutogradState.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <typeinfo>
#include <utility>

namespace fastpipe {

namespace {

// The way to a protected member.
struct Protected : Node {
  static constexpr auto kMutex = &Protected::mutex_;
};

}  // namespace

std::unique_lock<std::mutex> lock(AccumulateGrad& leaf) {
  return std::unique_lock<std::mutex>(leaf.*Protected::kMutex);
}

bool adds_on_current_stream(AccumulateGrad& leaf) {
  const std::optional<c10::Stream> stream = leaf.stream();
  return !stream || *stream == current_stream(stream->device());
}

void run_post_accumulate_hooks(AccumulateGrad& leaf) {
  const auto& hook = leaf.tensor_post_acc_grad_hooks();
  if (hook != nullptr) (*hook)(leaf.variable);
}

bool is_watched(Node& node) {
  return !node.pre_hooks().empty() || !node.post_hooks().empty() || !node.tensor_pre_hooks().empty() ||
         !node.retains_grad_hooks().empty();
}

bool is_cast(const Node& node) {
  return typeid(node) == typeid(torch::autograd::generated::ToCopyBackward0);
}

void run_engine(const EdgeList& roots, const std::vector<at::Tensor>& gradients) {
  constexpr bool kKeepGraph = false;
  constexpr bool kCreateGraph = false;
  constexpr bool kAccumulate = true;
  try {
    torch::autograd::Engine::get_default_engine().execute(roots, gradients, kKeepGraph, kCreateGraph, kAccumulate);
  } catch (python_error& error) {
    const py::gil_scoped_acquire gil;
    // The engine's Python face leaves the exception set, as its own caller wants it.
    if (PyErr_Occurred() == nullptr) error.restore();
    throw py::error_already_set();
  }
}

namespace {

// Null as long as no DTensor can have been made. Kept for as long as the process lives.
PyObject* dtensor_class() {
  static PyObject* found = nullptr;
  if (found == nullptr) {
    const auto name = py::str("torch.distributed.tensor");
    const auto module = py::reinterpret_steal<py::object>(PyImport_GetModule(name.ptr()));
    if (module) found = py::object(module.attr("DTensor")).release().ptr();
  }
  return found;
}

py::object wrapped(const at::Tensor& tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}

}  // namespace

bool is_dtensor(const at::Tensor& tensor) {
  if (!is_subclass(tensor)) return false;
  const py::gil_scoped_acquire gil;
  PyObject* const type = dtensor_class();
  return type != nullptr && py::isinstance(wrapped(tensor), py::handle(type));
}

at::Tensor local_shard(const at::Tensor& tensor) {
  const py::gil_scoped_acquire gil;
  const c10::AutoGradMode without_graph(false);
  return wrapped(tensor).attr("to_local")().cast<at::Tensor>();
}

bool in_reentrant_checkpoint() {
  const auto node = torch::autograd::get_current_node();
  return node && node->name() == "CheckpointFunctionBackward";
}

namespace {

c10::SafePyObject make_group() {
  const py::gil_scoped_acquire gil;
  return {py::module_::import("torch.utils.checkpoint").attr("GraphExecGroup")().release().ptr(), getPyInterpreter()};
}

}  // namespace

RecomputeGroup::RecomputeGroup() : object_(make_group()) {}

InRecomputeGroup::InRecomputeGroup(const RecomputeGroup& group)
    : before_(c10::AutogradState::get_tls_state().get_graph_exec_group()) {
  c10::AutogradState::get_tls_state().set_graph_exec_group(group.object());
}

InRecomputeGroup::~InRecomputeGroup() {
  c10::AutogradState::get_tls_state().set_graph_exec_group(std::move(before_));
}

PyObject* to_object(const at::Tensor& tensor) {
  return THPVariable_Wrap(tensor);
}

bool is_tensor(const py::handle& object) {
  return THPVariable_Check(object.ptr());
}

const at::Tensor& tensor_from(const py::handle& object) {
  return THPVariable_Unpack(object.ptr());
}

bool is_parameter(const at::Tensor& tensor) {
  const py::gil_scoped_acquire gil;
  const py::object object = wrapped(tensor);
  const int is = PyObject_IsInstance(object.ptr(), ParameterClass);
  if (is < 0) throw py::error_already_set();
  return is == 1;
}

py::error_already_set translated(const std::exception_ptr& error) {
  torch::translate_exception_to_python(error);
  return {};
}

}  // namespace fastpipe
