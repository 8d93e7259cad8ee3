// The one door to what torch does not document for C++: no other file names torch::autograd, c10d or c10::impl, or
// includes a header of torch/csrc but that of pybind11 (tests/unit/test_csrc.py).
//
// All of it was seen in torch 2.11 and 2.13, the oldest and the newest that fastpipe is built against. What goes away
// or changes its signature does not compile: setup.py then builds no native runtime, fastpipe.native_status() says
// why, and the Python executor runs. Where something else happens instead, its line says so ("if gone").
#pragma once

#include <ATen/SavedTensorHooks.h>
#include <ATen/SequenceNumber.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/linear_native.h>
#include <ATen/record_function.h>
#include <c10/core/SafePyObject.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <c10/util/flat_hash_map.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <type_traits>
#include <utility>
#include <vector>

namespace fastpipe {

// --- autograd's graph -----------------------------------------------------------------------------------------------

// A node of the graph, to derive from; an edge to a node's input; a saved tensor, which hooks may pack away; the node
// that adds to a leaf's `.grad`.
using Node = torch::autograd::Node;
using Edge = torch::autograd::Edge;
using EdgeList = torch::autograd::edge_list;
using VariableList = torch::autograd::variable_list;
using SavedVariable = torch::autograd::SavedVariable;
using AccumulateGrad = torch::autograd::AccumulateGrad;
template <typename Item>
using FlatSet = ska::flat_hash_set<Item>;

// A pointer to a node: an intrusive_ptr in 2.13, a shared_ptr in 2.11. Taken from Edge, so either compiles.
using NodePtr = std::decay_t<decltype(std::declval<Edge>().function)>;

inline constexpr bool kSharedNodes = std::is_same_v<NodePtr, std::shared_ptr<Node>>;

// The pointer to a node of a known kind.
template <typename Kind>
using SharedNode = std::conditional_t<kSharedNodes, std::shared_ptr<Kind>, c10::intrusive_ptr<Kind>>;

template <typename Kind, typename... Arguments>
SharedNode<Kind> make_node(Arguments&&... arguments) {
  if constexpr (kSharedNodes) {
    return std::make_shared<Kind>(std::forward<Arguments>(arguments)...);
  } else {
    return c10::make_intrusive<Kind>(std::forward<Arguments>(arguments)...);
  }
}

// Where a tensor's gradient goes: its node, or for a leaf the one that accumulates.
inline Edge gradient_edge(const at::Tensor& tensor) {
  return torch::autograd::impl::gradient_edge(tensor);
}

// Makes a tensor an output of the node: one that has just been made, or any, with what views and in-place changes need.
inline void attach_new(at::Tensor& tensor, const NodePtr& node) {
  torch::autograd::create_gradient_edge(tensor, node);
}
inline void attach(at::Tensor& output, const NodePtr& node) {
  torch::autograd::set_history(output, node);
}

// Null for a node that is not a leaf's.
inline AccumulateGrad* as_leaf(Node* node) {
  return dynamic_cast<AccumulateGrad*>(node);
}
inline const at::Tensor& tensor_of(const AccumulateGrad& leaf) {
  return leaf.variable;
}
inline at::Tensor& grad_of(AccumulateGrad& leaf) {
  return leaf.variable.mutable_grad();
}
// What the engine holds while it adds to the leaf's `.grad`, but not while it runs hooks of that.
std::unique_lock<std::mutex> lock(AccumulateGrad& leaf);
// Whether the engine adds to the leaf's `.grad` on this thread's stream. It takes that of the stage that used the leaf
// first, whoever makes the gradient. Also true of a leaf on a device without streams.
bool adds_on_current_stream(AccumulateGrad& leaf);
// Those of register_post_accumulate_grad_hook, which AccumulateGrad runs when it has added.
void run_post_accumulate_hooks(AccumulateGrad& leaf);
// Whether hooks of any kind want to see what comes to the node.
bool is_watched(Node& node);
// Whether a node is that of Tensor.to(dtype), as autocast makes one of a weight. If gone (another node casts): weights
// under autocast are added to `.grad` by the engine, which takes another pass over memory.
bool is_cast(const Node& node);

// How many nodes this thread has made: the counter that numbers them. If gone (it counts something else): tests of
// recomputed random numbers fail.
inline std::uint64_t count_nodes() {
  return at::sequence_number::peek();
}

// --- autograd's engine ----------------------------------------------------------------------------------------------

// Adds to the leaves' `.grad`; the graph it went through is used up. Without the GIL. A Python exception within it is
// thrown as pybind11 throws one, where the engine throws torch's python_error.
void run_engine(const EdgeList& roots, const std::vector<at::Tensor>& gradients);

// The number of the engine's run that this thread works for; -1 for none.
inline int current_engine_run() {
  return torch::autograd::get_current_graph_task_id();
}
inline bool in_engine() {
  return current_engine_run() != -1;
}
// Whether this thread runs the backward of a reentrant checkpoint, known by its node's name. If gone (it is named
// otherwise): linears that it recomputes do not wait for W.
bool in_reentrant_checkpoint();
// Whether what autograd saves now may be computed again, as far as can be told: saved tensors are packed by hooks.
inline bool in_checkpoint() {
  return !at::SavedTensorDefaultHooks::get_tls_state().stack.empty();
}

// What I and W of one microbatch are to torch's checkpoints without reentrance, which would recompute for every run:
// a torch.utils.checkpoint.GraphExecGroup. If gone: AttributeError in the first step that needs one.
class RecomputeGroup {
 public:
  // Takes the GIL, and so does every run of the engine within it: there is one only where it may be needed.
  RecomputeGroup();

  const c10::SafePyObject& object() const { return object_; }

 private:
  c10::SafePyObject object_;
};

// This thread runs the engine for a group, from its beginning to its end: what GraphExecGroup.__enter__ sets.
class InRecomputeGroup {
 public:
  explicit InRecomputeGroup(const RecomputeGroup& group);
  InRecomputeGroup(const InRecomputeGroup&) = delete;
  InRecomputeGroup& operator=(const InRecomputeGroup&) = delete;
  ~InRecomputeGroup();

 private:
  std::optional<c10::SafePyObject> before_;
};

// --- the state of a thread, and dispatch ----------------------------------------------------------------------------

// What this thread, and the engine's threads that work for it, can look up while the note lasts. Of thread-local state
// the engine hands over, ThreadLocalDebugInfo alone is free for others than torch, under the kinds that torch's own
// tests use. What those threads do for this one ends before the note does, so the note owns nothing.
enum class NoteKind { kAction, kArming };

class ThreadNote {
 public:
  using Noted = c10::DebugInfoBase;

  ThreadNote(NoteKind kind, Noted& noted)
      : guard_(kind_of(kind), std::shared_ptr<Noted>(std::shared_ptr<void>(), &noted)) {}

  // Null where there is none.
  static const Noted* find(NoteKind kind) { return c10::ThreadLocalDebugInfo::get(kind_of(kind)); }

 private:
  static constexpr c10::DebugInfoKind kind_of(NoteKind kind) {
    return kind == NoteKind::kAction ? c10::DebugInfoKind::TEST_INFO : c10::DebugInfoKind::TEST_INFO_2;
  }

  c10::DebugInfoGuard guard_;
};

// Whether this thread traces or transforms what it is given: by a mode of Python's, or by these keys. A graph that is
// traced now runs later, and elsewhere.
inline bool is_tracing() {
  using Key = c10::DispatchKey;
  constexpr c10::DispatchKeySet kTracing({Key::Python, Key::PythonTLSSnapshot, Key::PreDispatch, Key::Functionalize,
                                          Key::FuncTorchDynamicLayerFrontMode, Key::FuncTorchDynamicLayerBackMode,
                                          Key::FuncTorchVmapMode, Key::Tracer});
  return c10::impl::TorchDispatchModeTLS::any_modes_set() ||
         c10::impl::tls_local_dispatch_key_set().included_.has_any(kTracing);
}

// Turns off autocast of every device for this thread; the region, and so the cache of casts, stays.
class WithoutAutocast final {
 private:
  c10::impl::ExcludeDispatchKeyGuard guard_{c10::autocast_dispatch_keyset};
};

// Whether a tensor has a dispatch of its own in Python.
inline bool is_subclass(const at::Tensor& tensor) {
  return tensor.key_set().has(c10::DispatchKey::Python);
}

// Whether such a tensor is a DTensor: the one subclass whose operators are those of plain tensors, on shards.
bool is_dtensor(const at::Tensor& tensor);

// The shard of a DTensor that this process has.
at::Tensor local_shard(const at::Tensor& tensor);

// A strided tensor without any key but these, and without a forward gradient: not fake, functional, batched, quantized,
// no subclass with a dispatch of its own, but for DTensor. PrivateUse1 is a device that torch does not know; who has
// one may call the kernel of aten::linear from there. If gone (a key that makes a tensor plain is new): linears do not
// wait for W.
inline bool is_plain(const at::Tensor& tensor) {
  using Key = c10::DispatchKey;
  constexpr c10::DispatchKeySet kPlain({Key::CPU, Key::CUDA, Key::PrivateUse1, Key::ADInplaceOrView, Key::AutogradCPU,
                                        Key::AutogradCUDA, Key::AutogradPrivateUse1, Key::AutocastCPU,
                                        Key::AutocastCUDA, Key::AutocastPrivateUse1});
  constexpr c10::DispatchKeySet kSubclass({Key::Python, Key::PythonTLSSnapshot});
  const auto others = tensor.key_set().raw_repr() & ~kPlain.raw_repr();
  return ((others & ~kSubclass.raw_repr()) == 0) && (others == 0 || is_dtensor(tensor)) &&
         tensor.layout() == at::kStrided && !tensor._fw_grad(0).defined();
}

// The composite kernel of aten::linear, which ours stands in front of.
inline at::Tensor composite_linear(const at::Tensor& input, const at::Tensor& weight,
                                   const std::optional<at::Tensor>& bias) {
  return at::native::linear(input, weight, bias);
}

// A range of torch's profiler, from begin() to end(); nothing where none runs. RECORD_FUNCTION for a range that is no
// C++ scope.
class ProfilerRange {
 public:
  ProfilerRange() = default;
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;

  // action: "2F0"; empty for what has no label. The prefix is that of torch's pipelines: without one torch's profiler
  // takes "2F0" for a mangled C++ name and shows "F0".
  void begin(const std::string& action) {
    if (action.empty()) return;
    if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) {
      function_.emplace(std::move(*callbacks));
      function_->before("PP:" + action);
    }
  }
  void end() noexcept { function_.reset(); }

 private:
  std::optional<at::RecordFunction> function_;
};

// --- tensors --------------------------------------------------------------------------------------------------------

// A variable of its own over the same memory: no history, and a version counter that starts afresh.
inline at::Tensor with_own_version(const at::Tensor& tensor) {
  return tensor.variable_data();
}
// Whether it is of a subclass with __torch_dispatch__.
inline bool has_python_dispatch(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->is_python_dispatch();
}

// A new reference to a tensor's object in Python. With the GIL.
PyObject* to_object(const at::Tensor& tensor);
bool is_tensor(const py::handle& object);
// Of an object that is_tensor().
const at::Tensor& tensor_from(const py::handle& object);
// Whether its object is a torch.nn.Parameter. Takes the GIL.
bool is_parameter(const at::Tensor& tensor);

// --- streams, whichever device this is ------------------------------------------------------------------------------

// On which the calling thread's work for the device goes.
inline c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}
inline c10::Stream stream_from_pool(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}
// Tensor.record_stream of memory that is no tensor's.
inline void record_on_stream(const c10::DataPtr& data, const c10::Stream& stream) {
  c10::impl::VirtualGuardImpl(data.device().type()).recordDataPtrOnStream(data, stream);
}

// --- exceptions -----------------------------------------------------------------------------------------------------

// The Python exception that torch makes of a C++ one. With the GIL.
py::error_already_set translated(const std::exception_ptr& error);

// --- torch.distributed ----------------------------------------------------------------------------------------------

// The C++ side of a ProcessGroup and of the Work of one message.
using ProcessGroup = c10d::ProcessGroup;
using ProcessGroupPtr = c10::intrusive_ptr<ProcessGroup>;
using Work = c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;

// Ends a wait for the message in another thread. A backend without (all but Gloo's): its own timeout does it.
inline void abort_wait(Work& work) {
  try {
    work.abort();
  } catch (const std::exception&) {
    // It says that it cannot.
  }
}
// Whether the backend has aborted a message by itself.
inline bool has_failed(ProcessGroup& group, c10::DeviceType device) {
  return group.getBackend(device)->getError() != c10d::ErrorType::SUCCESS;
}
// Messages between the two calls are one operation: ncclGroupStart and ncclGroupEnd. Its Work is returned.
inline bool can_coalesce(ProcessGroup& group, c10::DeviceType device) {
  return group.getBackend(device)->supportsCoalescing();
}
inline void start_coalescing(ProcessGroup& group, c10::DeviceType device) {
  group.startCoalescing(device);
}
inline WorkPtr end_coalescing(ProcessGroup& group, c10::DeviceType device) {
  return group.endCoalescing(device);
}
// Drops a group's backends: it runs nothing more, and says so. A backend of Gloo ends with its last reference, and its
// connections with it, which is how peers in a collective are unblocked. Not while a thread uses the group. If gone (it
// keeps them): peers wait for their timeout, and tests of meshes fail.
inline void drop_backends(ProcessGroup& group) {
  group.release_resources();
}

}  // namespace fastpipe
