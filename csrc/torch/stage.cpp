#include "stage.h"

#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "core/common.h"
#include "python_errors.h"
#include "weight_grad.h"

namespace fastpipe {

namespace {

// Where received tensors enter a stage's graph. It catches the gradients as autograd made them. (Those of leaves would
// be laid out like the leaf; what the stage before computes from them could then differ, in its last bits, from the
// unsplit model.)
class Entry final : public Node {
 public:
  VariableList apply(VariableList&& gradients) override {
    caught_ = std::move(gradients);
    return {};
  }
  // By the order in which the tensors entered; empty when no gradient reached any of them.
  VariableList take_caught() { return std::exchange(caught_, {}); }

 private:
  VariableList caught_;
};

// The same memory (and the same version counter, so that in-place changes are noticed) as an input of the graph.
at::Tensor enter(const at::Tensor& tensor, const NodePtr& entry) {
  at::Tensor entered = tensor.detach();
  attach_new(entered, entry);
  return entered;
}

const std::vector<at::Tensor>& tensors_of(const Payload* payload) {
  static const std::vector<at::Tensor> none;
  return payload == nullptr ? none : static_cast<const TensorPayload*>(payload)->taken_in();
}

py::tuple to_tuple(const std::vector<at::Tensor>& tensors) {
  py::tuple tuple(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) PyTuple_SET_ITEM(tuple.ptr(), i, to_object(tensors[i]));
  return tuple;
}

// A gradient for every input that requires one, used or not: its sender waits for as many. Notes whether any is used.
std::vector<at::Tensor> input_gradients(const std::vector<at::Tensor>& inputs, const NodePtr& entry,
                                        std::optional<bool>& reached) {
  if (inputs.empty()) return {};
  std::vector<at::Tensor> gradients = static_cast<Entry&>(*entry).take_caught();
  gradients.resize(inputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    reached = reached.value_or(false) || gradients[i].defined();
    if (!gradients[i].defined()) {
      gradients[i] = at::zeros_like(inputs[i].detach());
    } else if (has_python_dispatch(gradients[i])) {
      gradients[i] = gradients[i].clone();  // for a collective that still runs (AsyncCollectiveTensor), clone() waits
    }
  }
  return gradients;
}

// What `later` gets from now on comes after what `earlier` has. Nothing where stages have no streams.
void follow(Fence& fence, const std::optional<c10::Stream>& earlier, const std::optional<c10::Stream>& later) {
  if (!earlier) return;
  {
    const c10::StreamGuard of_earlier(*earlier);
    fence.record(earlier->device());
  }
  const c10::StreamGuard of_later(*later);
  fence.wait();
}

}  // namespace

ActionContext::ActionContext(const Step& step, Op op, std::int32_t stage, std::int32_t microbatch)
    : step_(step),
      op_(op),
      stage_(stage),
      microbatch_(microbatch),
      training_(op != Op::kF || c10::GradMode::is_enabled()),
      note_(NoteKind::kAction, *this) {}

const ActionContext* ActionContext::current() {
  return static_cast<const ActionContext*>(ThreadNote::find(NoteKind::kAction));
}

bool ActionContext::is_last_microbatch() const {
  const std::size_t kind = op_ == Op::kF ? 0 : op_ == Op::kW ? 2 : 1;
  return step_.last.at(kind) == microbatch_;
}

TorchStage::TorchStage(std::int32_t index, bool is_first, bool is_last, bool fused_weight_grad,
                       const RankProgram& program)
    : index_(index),
      is_first_(is_first),
      is_last_(is_last),
      keeps_graph_(program.has_backward()),
      records_(program.num_microbatches()) {
  for (std::size_t position = 0; position < program.size(); ++position) {
    const Instruction it = program[position];
    if (it.op != Op::kI || it.stage != index) continue;
    records_[it.microbatch].weights = std::make_shared<WeightGradients>(fused_weight_grad);
  }
}

std::string TorchStage::place(std::int32_t microbatch) const {
  return "stage " + std::to_string(index_) + ", microbatch " + std::to_string(microbatch);
}

Timed TorchStage::timed(Op op, std::int32_t microbatch, const Payload* given) const {
  // The stream waits for the inputs before its clock starts.
  if (times_ != nullptr) tensors_of(given);
  return {times_, op, index_, microbatch};
}

void TorchStage::forward(std::int32_t microbatch, const Payload* input) {
  const c10::OptionalStreamGuard stream(stream_);
  const Timed span = timed(Op::kF, microbatch, input);
  const ActionContext context(calls_.context, Op::kF, index_, microbatch);
  run(records_[microbatch], Arming::Phase::kForward, microbatch, input,
      [&](const Tensors& inputs) { return calls_.run(microbatch, to_tuple(inputs)); });
}

void TorchStage::run(Record& record, Arming::Phase phase, std::int32_t microbatch, const Payload* input, Call call) {
  {
    std::optional<Arming> arming;
    if (record.weights) arming.emplace(record.weights, phase);
    enter_graph(record, tensors_of(input));
    {
      const py::gil_scoped_acquire gil;
      take_outputs(microbatch, call(entered_), record.outputs);
    }
    entered_.clear();
  }
  if (!keeps_graph_) {
    if (is_last_) record.outputs.clear();
    return;
  }
  for (const at::Tensor& output : record.outputs) {
    if (!output.requires_grad()) continue;
    record.roots.push_back(gradient_edge(output));
    if (calls_.fuse) record.kept.push_back(output);
  }
  if (record.weights) split(record);
}

void TorchStage::split(const Record& record) {
  Node* const entry = record.entry.get();
  record.weights->split(record.roots, {&entry, entry == nullptr ? 0UL : 1UL});
}

void TorchStage::enter_graph(Record& record, const Tensors& inputs) {
  entered_ = inputs;
  if (!keeps_graph_) return;
  for (at::Tensor& tensor : entered_) {
    if (!tensor.requires_grad()) continue;
    if (record.inputs.empty()) record.entry = make_node<Entry>();
    record.inputs.push_back(tensor);
    tensor = enter(tensor, record.entry);
  }
}

void TorchStage::take_outputs(std::int32_t microbatch, const py::object& result, Tensors& outputs) const {
  const char* complaint = ": run() must return a tuple of tensors; found ";
  if (!PyTuple_Check(result.ptr())) {
    throw ArgumentError(place(microbatch) + complaint + Py_TYPE(result.ptr())->tp_name);
  }
  outputs.clear();
  for (const py::handle item : py::reinterpret_borrow<py::tuple>(result)) {
    if (!is_tensor(item)) {
      throw ArgumentError(place(microbatch) + complaint + "a " + Py_TYPE(item.ptr())->tp_name + " in it");
    }
    outputs.push_back(tensor_from(item));
  }
}

template <typename Body>
void TorchStage::backwards(Op op, std::int32_t microbatch, const Body& body) const {
  const ActionContext context(calls_.context, op, index_, microbatch);
  // as after the end of the user's region: autocast would cast the operands of a backward in fp32
  const WithoutAutocast guard;
  if (!calls_.around) return body();
  const py::gil_scoped_acquire gil;
  calls_.around(without_gil(body));
}

void TorchStage::backward(std::int32_t microbatch, const Payload* gradient) {
  const c10::OptionalStreamGuard stream(stream_);
  const Timed span = timed(Op::kB, microbatch, gradient);
  if (microbatch == calls_.last_backward) run_collective(Op::kB, false);
  backwards(Op::kB, microbatch, [&] { differentiate(microbatch, gradient); });
}

void TorchStage::differentiate(std::int32_t microbatch, const Payload* gradient) {
  Record& record = records_[microbatch];
  const Tensors& gradients = gradients_for(microbatch, record, gradient);
  if (!record.roots.empty()) {
    const BackwardRegion region(calls_.random, BackwardRegion::Kind::kBackward);
    run_engine(record.roots, gradients);
  }
  root_gradients_.clear();
  end(record);
}

const TorchStage::Tensors& TorchStage::gradients_for(std::int32_t microbatch, const Record& record,
                                                     const Payload* gradient) {
  const Tensors& gradients = is_last_ ? root_gradients(microbatch, record) : tensors_of(gradient);
  if (gradients.size() == record.roots.size()) return gradients;
  throw ArgumentError(place(microbatch) + ": " + std::to_string(gradients.size()) + " output gradients arrived for " +
                      std::to_string(record.roots.size()) + " outputs that require one");
}

void TorchStage::Record::drop_graph() noexcept {
  inputs.clear();
  entry = NodePtr();
  outputs.clear();
  roots.clear();
  kept.clear();
}

void TorchStage::end(Record& record) {
  record.gradients = input_gradients(record.inputs, record.entry, reaches_inputs_);
  record.drop_graph();
}

bool TorchStage::can_overlap(const Stage& pair) const {
  const auto& other = static_cast<const TorchStage&>(pair);
  if (calls_.collective || other.calls_.collective) return false;  // collectives run in the order of the actions
  return !excludes(other);
}

bool TorchStage::can_alternate(const Stage& pair) const {
  const auto& other = static_cast<const TorchStage&>(pair);
  if (!exchanges() && !other.exchanges()) return false;
  if (calls_.collective && this == &pair) return false;  // a wrapper has one action at a time
  return !excludes(other);
}

// What is recomputed writes buffers again, BatchNorm's say, and an F of the same stage does so, too.
bool TorchStage::excludes(const TorchStage& pair) const {
  const RngGuard* const random = calls_.random;
  return random != nullptr && (random->exclusive || (random->recomputes && this == &pair));
}

bool TorchStage::fuse(std::int32_t microbatch, const Payload* input, Stage& other, std::int32_t pair_microbatch,
                      const Payload* gradient) {
  const c10::OptionalStreamGuard stream(stream_);
  auto& pair = static_cast<TorchStage&>(other);
  Record& theirs = pair.records_[pair_microbatch];
  const auto& partners = calls_.partners;
  const bool fits = std::find(partners.begin(), partners.end(), pair.index_) != partners.end();
  if (!fits || theirs.kept.empty()) return false;
  const Timed span = timed(Op::kF, microbatch, input);
  const ActionContext context(calls_.context, Op::kF, index_, microbatch);
  const bool from_loss = pair.is_last_ && !pair.calls_.output_grads;
  const Tensors* const gradients = from_loss ? nullptr : &pair.gradients_for(pair_microbatch, theirs, gradient);
  // the method may read the other stage's outputs
  follow(fused_, pair.stream_, stream_);
  run(records_[microbatch], Arming::Phase::kFused, microbatch, input, [&](const Tensors& inputs) {
    const py::object grads = from_loss ? py::object(py::none()) : to_tuple(*gradients);
    return calls_.fuse(microbatch, to_tuple(inputs), pair.index_, to_tuple(theirs.kept), grads);
  });
  pair.root_gradients_.clear();
  // what the method has made, and the zeros of what it has not, are from now on the other stage's
  follow(fused_, stream_, pair.stream_);
  const c10::OptionalStreamGuard of_pair(pair.stream_);
  end(theirs);
  return true;
}

void TorchStage::backward_input(std::int32_t microbatch, const Payload* gradient) {
  const c10::OptionalStreamGuard stream(stream_);
  const Timed span = timed(Op::kI, microbatch, gradient);
  backwards(Op::kI, microbatch, [&] { differentiate_inputs(microbatch, gradient); });
}

void TorchStage::differentiate_inputs(std::int32_t microbatch, const Payload* gradient) {
  WeightGradients& weights = *records_[microbatch].weights;
  {
    const Arming arming(records_[microbatch].weights, Arming::Phase::kBackward);
    differentiate(microbatch, gradient);
  }
  if (!deferred_) deferred_.emplace();
  if (!calls_.knows_deferred) {  // another microbatch may use others, of a mixture of experts for example
    const auto leaves = weights.leaves();
    deferred_->insert(deferred_->end(), leaves.begin(), leaves.end());
  }
  records_[microbatch].held_bytes = weights.held_bytes();
  held_bytes_ += records_[microbatch].held_bytes;
  peak_held_bytes_ = std::max(peak_held_bytes_, held_bytes_);
}

void TorchStage::backward_weight(std::int32_t microbatch) {
  const c10::OptionalStreamGuard stream(stream_);
  const Timed span = timed(Op::kW, microbatch, nullptr);
  if (microbatch == calls_.last_backward) run_collective(Op::kW, false);
  Record& record = records_[microbatch];
  backwards(Op::kW, microbatch, [&] {
    // a weight may come from a checkpoint, whose recompute must be what its forward was
    const Arming arming(record.weights, Arming::Phase::kBackward);
    const BackwardRegion region(calls_.random, BackwardRegion::Kind::kWeight);
    record.weights->compute();
  });
  held_bytes_ -= std::exchange(record.held_bytes, 0);
  if (!calls_.fold) return;
  const py::gil_scoped_acquire gil;
  calls_.fold();
}

void TorchStage::run_collective(Op op, bool failed) {
  if (!calls_.collective) return;
  const py::gil_scoped_acquire gil;
  calls_.collective(static_cast<int>(op), failed);
}

const TorchStage::Tensors& TorchStage::root_gradients(std::int32_t microbatch, const Record& record) {
  const Tensors given = calls_.output_grads ? given_gradients(microbatch, record) : Tensors();
  root_gradients_.clear();
  for (std::size_t i = 0; i < record.outputs.size(); ++i) {
    const at::Tensor& output = record.outputs[i];
    if (!output.requires_grad()) continue;
    const bool is_given = !given.empty() && given[i].defined();
    if (!is_given && output.numel() != 1) {
      throw ArgumentError(place(microbatch) + ": the root of the backward has " + std::to_string(output.numel()) +
                          " elements and no gradient; give a scalar loss, or output_grad=");
    }
    root_gradients_.push_back(is_given ? given[i] : at::ones_like(output.detach()));
  }
  return root_gradients_;
}

TorchStage::Tensors TorchStage::given_gradients(std::int32_t microbatch, const Record& record) const {
  const py::gil_scoped_acquire gil;
  const py::object result = calls_.output_grads(microbatch);
  Tensors gradients(record.outputs.size());
  if (result.is_none()) return gradients;
  if (!PyTuple_Check(result.ptr()) || py::len(result) != gradients.size()) {
    throw ArgumentError(place(microbatch) + ": output_grads() must return a tuple of " +
                        std::to_string(gradients.size()) + ", a tensor or None for each output, or None");
  }
  std::size_t i = 0;
  for (const py::handle item : py::reinterpret_borrow<py::tuple>(result)) {
    if (!item.is_none()) gradients[i] = item.cast<at::Tensor>();
    ++i;
  }
  return gradients;
}

void TorchStage::take(ChannelKind kind, std::int32_t microbatch, Payload& into) {
  Record& record = records_[microbatch];
  auto& payload = static_cast<TensorPayload&>(into);
  Tensors& produced = kind == ChannelKind::kActivation ? record.outputs : record.gradients;
  for (const at::Tensor& tensor : produced) {
    payload.add(tensor.detach().set_requires_grad(kind == ChannelKind::kActivation && tensor.requires_grad()));
  }
  payload.filled();
  produced.clear();
}

void TorchStage::release() noexcept {
  for (Record& record : records_) {
    record.drop_graph();
    record.gradients.clear();
    if (record.weights) record.weights->clear();
    record.held_bytes = 0;
  }
  entered_.clear();
  root_gradients_.clear();
  held_bytes_ = 0;
}

}  // namespace fastpipe
