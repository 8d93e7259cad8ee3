#include "runner.h"

#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <pybind11/numpy.h>

#include <algorithm>
#include <utility>

#include "core/common.h"
#include "payload.h"
#include "python_errors.h"

namespace fastpipe {

namespace {

std::size_t count(const std::vector<StagePlace>& stages) {
  std::int32_t highest = -1;
  for (const StagePlace& stage : stages) highest = std::max(highest, std::get<0>(stage));
  return static_cast<std::size_t>(highest + 1);
}

// A copy of this thread's context variables; null if none is set. The GIL must be held.
py::object context_variables() {
  auto copied = py::reinterpret_steal<py::object>(PyContext_CopyCurrent());
  if (!copied) throw py::error_already_set();
  return py::len(copied) == 0 ? py::object() : copied;
}

// Gives this thread the context variables of a context while it lasts. Takes the GIL, unless there are none.
class ContextGuard final {
 public:
  explicit ContextGuard(py::handle context) : context_(context) {
    if (!context_) return;
    const py::gil_scoped_acquire gil;
    if (PyContext_Enter(context_.ptr()) != 0) throw py::error_already_set();
  }
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;
  ~ContextGuard() {
    if (!context_) return;
    const py::gil_scoped_acquire gil;
    if (PyContext_Exit(context_.ptr()) != 0) PyErr_Clear();  // a function of the graph left another one entered
  }

 private:
  const py::handle context_;
};

// The state of Python's of a helper thread. It lasts as long as the thread, as the engine leaves an error in it, and
// ends in it: since Python 3.12 a state that another thread deletes takes that thread's own with it.
class ThreadState final {
 public:
  explicit ThreadState(const bool& can_take_gil)
      : can_take_gil_(can_take_gil), state_(PyThreadState_New(PyInterpreterState_Main())) {}
  ThreadState(const ThreadState&) = delete;
  ThreadState& operator=(const ThreadState&) = delete;
  ~ThreadState() {
    if (!can_take_gil_) return;
    PyEval_RestoreThread(state_);
    PyThreadState_Clear(state_);
    PyThreadState_DeleteCurrent();
  }

 private:
  const bool& can_take_gil_;
  PyThreadState* state_;
};

// Whether this thread is in a region of autocast.
bool in_autocast() {
  at::autocast::increment_nesting();
  return at::autocast::decrement_nesting() > 0;
}

// Makes this thread one in a region of autocast, where the caller is: the end of a region within it, such as a
// checkpoint's, then keeps the cache of casts, which all threads share and a forward may be using.
class AutocastGuard final {
 public:
  explicit AutocastGuard(bool in_autocast) : in_autocast_(in_autocast) {
    if (in_autocast_) at::autocast::increment_nesting();
  }
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;
  ~AutocastGuard() {
    if (in_autocast_) at::autocast::decrement_nesting();
  }

 private:
  const bool in_autocast_;
};

// Whether the interpreter ends: another thread that asks for the GIL then never gets it. The GIL must be held.
bool is_finalizing() {
  PyObject* const function = PySys_GetObject("is_finalizing");  // null once sys is gone
  const auto found = py::reinterpret_steal<py::object>(function != nullptr ? PyObject_CallNoArgs(function) : nullptr);
  PyErr_Clear();
  return found.ptr() != Py_False;
}

}  // namespace

Runner::Runner(const RankProgram& program, const std::vector<StagePlace>& stages, const Connect& connect,
               double timeout_seconds, at::Device device, PairWay pairs, std::vector<c10::Stream> streams)
    : device_(device), streams_(device, std::move(streams)) {
  if (streams_.any() && streams_.size() != stages.size()) {
    throw ArgumentError("streams has " + std::to_string(streams_.size()) + " entries for " +
                        std::to_string(stages.size()) + " stages; give one for each stage, or none");
  }
  Stages owned(count(stages));
  for (const auto& [index, is_first, is_last, fused] : stages) {
    auto stage = std::make_unique<TorchStage>(index, is_first, is_last, fused, program);
    stage->set_stream(streams_.of(stages_.size()));
    stages_.push_back(stage.get());
    owned.at(index) = std::move(stage);
  }
  for (std::size_t position = 0; position < program.size(); ++position) {
    labels_.push_back(program.action_text(position));
    const Instruction it = program[position];
    if (it.op != Op::kOverlapFB) continue;
    labels_of_backwards_[position] = std::to_string(it.pair_stage) + "B" + std::to_string(it.pair_microbatch);
  }
  executor_ = std::make_unique<Executor>(
      program, std::move(owned), connect(program, timeout_seconds),
      [device, fenced = streams_.any()] { return std::make_unique<TensorPayload>(device, fenced); }, pairs);
}

Runner::~Runner() {
  if (Py_IsInitialized() == 0) return;
  helper_can_take_gil_ = !is_finalizing();
  const py::gil_scoped_release no_gil;
  executor_.reset();  // waits for the helper to end
}

py::object Runner::run(std::int64_t signature, bool announce, const std::vector<py::tuple>& calls,
                       const py::object& on_failure, int num_threads, bool trace, bool drain,
                       const py::object& in_turns, std::size_t wait_at, const py::object& while_waiting) {
  if (on_failure_) throw Error("this executor is running a step already; it runs one at a time, in one thread");
  // The sums of a kernel depend on how many threads share it; a thread of Python's starts with torch's default.
  if (num_threads > 0 && at::get_num_threads() != num_threads) at::set_num_threads(num_threads);
  state_.emplace();
  in_autocast_ = in_autocast();
  num_threads_ = at::get_num_threads();
  bind(calls);
  set_times(trace);
  on_failure_ = on_failure;
  in_turns_ = in_turns;
  wait_at_ = wait_at;
  if (!while_waiting.is_none()) while_waiting_ = while_waiting;
  context_ = context_variables();
  const auto size = static_cast<py::ssize_t>(labels_.size());
  py::array_t<double> start(size);
  py::array_t<double> end(size);
  const Outcome outcome = run_without_gil(signature, announce, start.mutable_data(), end.mutable_data(), drain);
  if (outcome == Outcome::kFailed) raise(to_python(executor_->take_error()));
  if (outcome == Outcome::kDrained) return py::none();
  return py::make_tuple(std::move(start), std::move(end));
}

void Runner::bind(const std::vector<py::tuple>& calls) {
  if (calls.size() != stages_.size()) {
    throw ArgumentError("calls has " + std::to_string(calls.size()) + " entries for " + std::to_string(stages_.size()) +
                        " stages; give one for each stage");
  }
  for (std::size_t i = 0; i < calls.size(); ++i) {
    if (calls[i].size() != 12) {
      throw ArgumentError(
          "calls: give (run, output_grads, guard, run_collective, fold, fuse, partners, last_backward, around, moment, "
          "exchanges, knows_deferred) for each stage");
    }
    const auto call = [&](py::ssize_t index) {
      const py::handle found = PyTuple_GET_ITEM(calls[i].ptr(), index);
      return found.is_none() ? py::handle() : found;
    };
    const auto [step, last] = calls[i][9].cast<std::pair<std::int64_t, std::array<std::int32_t, 3>>>();
    stages_[i]->bind({call(0), call(1), calls[i][2].cast<RngGuard*>(), call(3), call(4), call(5),
                      calls[i][6].cast<std::vector<std::int32_t>>(), calls[i][7].cast<std::int32_t>(), call(8),
                      ActionContext::Step{step, last}, calls[i][10].cast<bool>(), calls[i][11].cast<bool>()});
  }
}

void Runner::set_times(bool trace) {
  times_ = nullptr;
  if (trace && !device_.is_cpu()) {
    if (!device_times_) device_times_.emplace(executor_->program(), device_);
    times_ = &*device_times_;
    times_->forget();
  }
  for (TorchStage* stage : stages_) stage->set_times(times_);
}

Outcome Runner::run_in_streams(std::int64_t signature, bool announce, double* start, double* end, bool drain) {
  streams_.fork();
  try {
    const Outcome outcome = executor_->run(signature, announce, *this, start, end, drain);
    streams_.join();
    if (times_ != nullptr && outcome == Outcome::kDone) times_->read(start, end);
    return outcome;
  } catch (...) {
    streams_.join();
    throw;
  }
}

Outcome Runner::run_without_gil(std::int64_t signature, bool announce, double* start, double* end, bool drain) {
  std::exception_ptr error;
  Outcome outcome = Outcome::kFailed;
  {
    const py::gil_scoped_release no_gil;
    try {
      outcome = run_in_streams(signature, announce, start, end, drain);
    } catch (...) {
      error = std::current_exception();
    }
  }
  on_failure_ = in_turns_ = while_waiting_ = py::handle();
  context_ = py::object();
  if (!error) return outcome;
  raise(to_python(error));
}

void Runner::starts(std::size_t position) {
  label_.begin(labels_[position]);
  if (noted_here(position)) times_->starts(position);
  if (while_waiting_ && position == wait_at_) {
    const py::gil_scoped_acquire gil;
    while_waiting_();
  }
}

void Runner::ends(std::size_t position) noexcept {
  if (noted_here(position)) times_->ends(position);
  label_.end();
}

// Computing stages note it themselves, on their streams.
bool Runner::noted_here(std::size_t position) const {
  return times_ != nullptr && !is_compute(executor_->program()[position].op);
}

void Runner::run_overlapped(std::size_t position, FunctionRef<void()> backward) {
  static thread_local const ThreadState own(helper_can_take_gil_);  // a helper belongs to one runner
  if (at::get_num_threads() != num_threads_) at::set_num_threads(num_threads_);
  const at::ThreadLocalStateGuard guard(*state_);
  const AutocastGuard autocast(in_autocast_);
  const ContextGuard context(context_);
  run_backward(position, backward);
}

void Runner::run_in_turns(std::size_t position, FunctionRef<void()> forward, FunctionRef<void()> backward,
                          bool backward_first) {
  const auto labelled = [&] { run_backward(position, backward); };
  const py::gil_scoped_acquire gil;
  in_turns_(without_gil(forward), without_gil(labelled), backward_first);
}

void Runner::run_backward(std::size_t position, FunctionRef<void()> backward) {
  const c10::OptionalStreamGuard stream(streams_.caller());
  ProfilerRange label;
  label.begin(labels_of_backwards_.at(position));
  backward();
}

void Runner::failed(std::size_t position, const std::exception_ptr& error) noexcept {
  const py::gil_scoped_acquire gil;
  try {
    on_failure_(position, to_python(error));
  } catch (py::error_already_set& unwanted) {
    unwanted.discard_as_unraisable("fastpipe: on_failure");
  }
}

}  // namespace fastpipe
