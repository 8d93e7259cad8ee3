#include "recompute_group.h"

#include <ATen/SavedTensorHooks.h>
#include <c10/core/AutogradState.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>

namespace fastpipe {

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

}  // namespace fastpipe
