// The Python face of the native runtime: every binding stands here, and nothing but bindings.
// (torch/csrc/utils/pybind.h instead of torch/extension.h: it brings torch's own pybind11 at a third of the time.)
#include <pybind11/numpy.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "codec.h"
#include "core/common.h"
#include "core/copy_engine.h"
#include "core/copy_engine_transport.h"
#include "core/executor.h"
#include "core/host_memory.h"
#include "core/program.h"
#include "core/shared_memory_exchange.h"
#include "core/shared_memory_transport.h"
#include "process_group.h"
#include "python_errors.h"
#include "random_numbers.h"
#include "runner.h"
#include "torch_private.h"
#include "weight_grad.h"

namespace fastpipe {

namespace {

using Columns = py::array_t<std::int32_t, py::array::c_style | py::array::forcecast>;
using ChannelTuple = std::tuple<std::int32_t, std::int32_t, std::int32_t>;

std::vector<Channel> to_channels(const std::vector<ChannelTuple>& tuples) {
  std::vector<Channel> channels;
  for (const auto& [source, destination, kind] : tuples) {
    channels.push_back({source, destination, static_cast<ChannelKind>(kind)});
  }
  return channels;
}

RankProgram to_program(std::int32_t rank, const Columns& columns, const std::vector<ChannelTuple>& channels) {
  if (columns.ndim() != 2 || columns.shape(0) != static_cast<py::ssize_t>(kNumColumns)) {
    throw ArgumentError("columns must be an int32 array of shape (7, number of instructions)");
  }
  return {rank, columns.data(), static_cast<std::size_t>(columns.shape(1)), to_channels(channels)};
}

std::unique_ptr<Runner> make_runner(std::int32_t rank, const Columns& columns,
                                    const std::vector<ChannelTuple>& channels, const std::vector<StagePlace>& stages,
                                    const Connect& connect, double timeout, const at::Device& device, int pairs,
                                    std::vector<c10::Stream> streams) {
  return std::make_unique<Runner>(to_program(rank, columns, channels), stages, connect, timeout, device,
                                  static_cast<PairWay>(pairs), std::move(streams));
}

// Python before 3.14 ends a thread that takes the GIL while the interpreter exits, by unwinding its stack. Through
// torch that terminates the process, of a rank that has raised and left a collective to a thread, for example. Such a
// thread is paused instead, until the process ends; it ends anyhow if the exit waits for that thread. Called at exit,
// in the main thread.
void pause_ending_threads() {
  static const std::thread::id main = std::this_thread::get_id();
  static const std::terminate_handler otherwise = std::get_terminate();
  std::set_terminate([] {
    if (std::this_thread::get_id() != main) std::this_thread::sleep_for(std::chrono::seconds(10));
    otherwise();
  });
}

// The programs of all ranks.
std::vector<RankProgram> to_programs(const std::vector<Columns>& columns, const std::vector<ChannelTuple>& channels) {
  std::vector<RankProgram> programs;
  for (std::size_t rank = 0; rank < columns.size(); ++rank) {
    programs.push_back(to_program(static_cast<std::int32_t>(rank), columns[rank], channels));
  }
  return programs;
}

std::shared_ptr<const SharedMemoryChannels> make_channels(std::shared_ptr<SharedMemoryLink> link,
                                                          const std::vector<ChannelTuple>& channels,
                                                          const std::vector<Columns>& columns,
                                                          std::optional<std::vector<bool>> carried,
                                                          const at::Device& device) {
  std::vector<ChannelNeeds> needs(channels.size());
  for (const RankProgram& program : to_programs(columns, channels)) count_needs(program, needs);
  return std::make_shared<SharedMemoryChannels>(
      std::move(link), std::make_shared<TensorCodec>(device), std::move(needs),
      carried ? std::move(*carried) : channels_between_ranks(to_channels(channels)));
}

Connect make_copy_engines(std::shared_ptr<CopyEngineLink> link, const std::vector<ChannelTuple>& channels,
                          const std::vector<Columns>& columns, const at::Device& device) {
  auto announced = make_channels(link->host(), channels, columns, std::nullopt, device);
  std::vector<CopyPlaces> places(channels.size());
  for (const RankProgram& program : to_programs(columns, channels)) add_places(program, places);
  return over_copy_engines(std::move(link), std::move(announced), std::move(places));
}

py::bytes to_bytes(const CopyTicket& ticket) {
  return py::bytes(reinterpret_cast<const char*>(ticket.data()), ticket.size());
}

CopyTicket to_ticket(const std::string& bytes) {
  CopyTicket ticket{};
  if (bytes.size() != ticket.size()) throw ArgumentError("a ticket has " + std::to_string(ticket.size()) + " bytes");
  std::memcpy(ticket.data(), bytes.data(), bytes.size());
  return ticket;
}

// A message a rank; None for one that is missing or dead.
py::list messages(const SharedMemoryExchange& exchange) {
  py::list found;
  for (std::int32_t rank = 0; rank < exchange.num_ranks(); ++rank) {
    const std::optional<std::string>& message = exchange.message(rank);
    found.append(message ? py::object(py::bytes(*message)) : py::none());
  }
  return found;
}

// With the two methods by which the ranks of a host find what each publishes.
template <typename Shared>
py::class_<Shared, std::shared_ptr<Shared>> bind_shared(py::module_& m, const char* name) {
  return py::class_<Shared, std::shared_ptr<Shared>>(m, name)
      .def("address",
           [](const Shared& shared) {
             const PublishedAddress address = shared.address();
             return py::make_tuple(address.process, address.descriptor, address.nonce);
           })
      .def(
          "connect",
          [](Shared& shared, std::int32_t rank, pid_t process, int descriptor, std::uint64_t nonce) {
            shared.connect(rank, {process, descriptor, nonce});
          },
          py::arg("rank"), py::arg("process"), py::arg("descriptor"), py::arg("nonce"));
}

void bind_exchange(py::module_& m) {
  bind_shared<SharedMemoryExchange>(m, "SharedMemoryExchange")
      .def(py::init<std::int32_t, std::int32_t>(), py::arg("rank"), py::arg("num_ranks"))
      .def("share_host", &SharedMemoryExchange::share_host, py::arg("num_ranks"))
      .def("post", [](SharedMemoryExchange& exchange, const py::bytes& message) { exchange.post(message); })
      .def("wait", &SharedMemoryExchange::wait, py::arg("seconds"), py::call_guard<py::gil_scoped_release>())
      .def("missing", &SharedMemoryExchange::missing)
      .def("messages", &messages);
}

void bind_shared_memory(py::module_& m) {
  bind_shared<SharedMemoryLink>(m, "SharedMemoryLink")
      .def(py::init([](std::int32_t rank, std::int32_t num_ranks, std::int32_t num_sharing) {
             return std::make_shared<SharedMemoryLink>(rank, num_ranks, usual_spin(num_sharing), check_signals);
           }),
           py::arg("rank"), py::arg("num_ranks"), py::arg("num_sharing"))
      .def_property_readonly(
          "spin", [](const SharedMemoryLink& link) { return std::chrono::duration<double>(link.spin()).count(); })
      .def("lose", &SharedMemoryLink::lose, py::arg("rank"));
}

void bind_copy_engine(py::module_& m) {
  using WithoutGil = py::call_guard<py::gil_scoped_release>;
  py::class_<CopyMemory, std::shared_ptr<CopyMemory>>(m, "CopyMemory");
  py::class_<CopyEngine, std::shared_ptr<CopyEngine>>(m, "CopyEngine")
      .def("allocate", &CopyEngine::allocate, py::arg("bytes"), WithoutGil())
      .def("ticket", [](CopyEngine& engine, const CopyMemory& memory) { return to_bytes(engine.ticket(memory)); })
      .def("open", [](CopyEngine& engine, const std::string& ticket) { return engine.open(to_ticket(ticket)); })
      .def("obstacle", &obstacle_to_flags, py::arg("timeout"), WithoutGil());
  py::class_<CopyEngineLink, std::shared_ptr<CopyEngineLink>>(m, "CopyEngineLink")
      .def(py::init<std::shared_ptr<SharedMemoryLink>, std::shared_ptr<CopyEngine>, double>(), py::arg("host"),
           py::arg("engine"), py::arg("timeout"));
#ifdef FASTPIPE_WITH_CUDA
  m.attr("has_cuda") = true;
  m.def("cuda_copy_engine", &make_cuda_copy_engine, py::arg("device"));
#else
  m.attr("has_cuda") = false;
#endif
}

// A thread-local note as a context of Python's: it is made of these at the beginning of a `with`, and ends with it.
template <typename Note, typename... Arguments>
class PythonContext {
 public:
  explicit PythonContext(Arguments... arguments) : arguments_(std::move(arguments)...) {}
  void enter() {
    std::apply([this](const Arguments&... arguments) { note_.emplace(arguments...); }, arguments_);
  }
  void exit(const py::args&) { note_.reset(); }

 private:
  std::tuple<Arguments...> arguments_;
  std::optional<Note> note_;
};

using PythonArming = PythonContext<Arming, std::shared_ptr<WeightGradients>, Arming::Phase>;
using PythonActionContext = PythonContext<ActionContext, ActionContext::Step, Op, std::int32_t, std::int32_t>;

// (stage, TorchStage::deferred(), the most bytes that waited for a W), a stage that has run an I in the step.
py::list deferred(const Runner& runner) {
  py::list stages;
  for (const TorchStage* stage : runner.stages()) {
    if (stage->deferred()) {
      stages.append(py::make_tuple(stage->index(), *stage->deferred(), stage->peak_held_bytes()));
    }
  }
  return stages;
}

// (stage, whether an input has got a gradient), a stage of which one requires it.
std::vector<std::pair<std::int32_t, bool>> reached(const Runner& runner) {
  std::vector<std::pair<std::int32_t, bool>> stages;
  for (const TorchStage* stage : runner.stages()) {
    if (stage->reaches_inputs()) stages.emplace_back(stage->index(), *stage->reaches_inputs());
  }
  return stages;
}

void split(WeightGradients& weights, const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
  EdgeList roots;
  for (const at::Tensor& output : outputs) roots.push_back(gradient_edge(output));
  std::vector<Node*> entries;
  for (const at::Tensor& input : inputs) entries.push_back(gradient_edge(input).function.get());
  weights.split(roots, entries);
}

void bind_weight_gradients(py::module_& m) {
  using WithoutGil = py::call_guard<py::gil_scoped_release>;
  py::class_<PythonArming>(m, "Arming").def("__enter__", &PythonArming::enter).def("__exit__", &PythonArming::exit);
  py::class_<WeightGradients, std::shared_ptr<WeightGradients>>(m, "WeightGradients")
      .def(py::init<bool>(), py::arg("fused"))
      .def(
          "armed",
          [](std::shared_ptr<WeightGradients> weights, bool backward, bool fused) {
            const auto forward = fused ? Arming::Phase::kFused : Arming::Phase::kForward;
            return std::make_unique<PythonArming>(std::move(weights), backward ? Arming::Phase::kBackward : forward);
          },
          py::arg("backward"), py::arg("fused") = false)
      .def("split", &split, py::arg("outputs"), py::arg("inputs"))
      .def("compute", &WeightGradients::compute, WithoutGil())
      .def("held_bytes", &WeightGradients::held_bytes)
      .def("leaves", &WeightGradients::leaves)
      .def("clear", &WeightGradients::clear);
}

// Step, stage, microbatch, kind, whether it is the stage's last of its kind, whether a backward follows; or None.
py::object current_context() {
  const ActionContext* const context = ActionContext::current();
  if (context == nullptr) return py::none();
  return py::make_tuple(context->step(), context->stage(), context->microbatch(), static_cast<int>(context->op()),
                        context->is_last_microbatch(), context->training());
}

void bind_contexts(py::module_& m) {
  py::class_<PythonActionContext>(m, "Moment")
      .def(py::init([](std::int64_t step, std::array<std::int32_t, 3> last, int op, std::int32_t stage,
                       std::int32_t microbatch) {
             return std::make_unique<PythonActionContext>(ActionContext::Step{step, last}, static_cast<Op>(op), stage,
                                                          microbatch);
           }),
           py::arg("step"), py::arg("last"), py::arg("op"), py::arg("stage"), py::arg("microbatch"))
      .def("__enter__", &PythonActionContext::enter)
      .def("__exit__", &PythonActionContext::exit);
  m.def("current", &current_context);
}

void bind_random_numbers(py::module_& m) {
  using OneMutex = std::unique_ptr<GeneratorsMutex, py::nodelete>;
  py::class_<GeneratorsMutex, OneMutex>(m, "GeneratorsLock")
      .def(py::init([] { return OneMutex(&GeneratorsMutex::get()); }))
      .def("__enter__", &GeneratorsMutex::lock, py::call_guard<py::gil_scoped_release>())
      .def("__exit__", [](GeneratorsMutex& mutex, const py::args&) { mutex.unlock(); })
      .def("held_here", [](const GeneratorsMutex&) { return GeneratorsMutex::held_here(); });
  py::class_<RngGuard>(m, "RngGuard")
      .def(py::init<>())
      .def_readwrite("exclusive", &RngGuard::exclusive)
      .def_readwrite("recomputes", &RngGuard::recomputes)
      .def_property(
          "recomputed", [](const RngGuard& guard) { return guard.recomputed.load(); },
          [](RngGuard& guard, bool recomputed) { guard.recomputed.store(recomputed); });
}

void translate(std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const Error&) {
    const py::object wrong = to_python(error);
    PyErr_SetObject(py::type::handle_of(wrong).ptr(), wrong.ptr());
  }
}

void bind_transports(py::module_& m) {
  // what a transport of Python's gives to an Executor, which makes its own end of it
  py::class_<Connect>(m, "Connect");
  m.def(
      "over_loopback",
      [](const std::vector<ChannelTuple>& channels, std::vector<std::int32_t> lanes, double delay) {
        return over_loopback(to_channels(channels), std::move(lanes), delay);
      },
      py::arg("channels"), py::arg("lanes"), py::arg("delay") = 0.0);
  m.def(
      "over_shared_memory",
      [](std::shared_ptr<SharedMemoryLink> link, const std::vector<ChannelTuple>& channels,
         const std::vector<Columns>& columns) {
        return over_shared_memory(make_channels(std::move(link), channels, columns, std::nullopt, at::kCPU));
      },
      py::arg("link"), py::arg("channels"), py::arg("columns"));
  m.def(
      "over_both",
      [](std::shared_ptr<SharedMemoryLink> link, const std::vector<ChannelTuple>& channels,
         const std::vector<Columns>& columns, std::vector<bool> near, const Connect& far) {
        auto plan = make_channels(std::move(link), channels, columns, std::move(near), at::kCPU);
        return over_both(std::move(plan), far);
      },
      py::arg("link"), py::arg("channels"), py::arg("columns"), py::arg("near"), py::arg("far"));
  m.def("over_copy_engines", &make_copy_engines, py::arg("link"), py::arg("channels"), py::arg("columns"),
        py::arg("device"));
  m.def(
      "drop_backends", [](const ProcessGroupPtr& group) { drop_backends(*group); }, py::arg("group"),
      py::call_guard<py::gil_scoped_release>());
  py::class_<WorkWaits, Waits>(m, "WorkWaits")
      .def(py::init<>())
      .def("lose", &WorkWaits::lose, py::arg("rank"), py::call_guard<py::gil_scoped_release>())
      .def(
          "wait",
          [](WorkWaits& waits, const WorkPtr& work, double seconds) {
            waits.wait(work, std::chrono::duration_cast<std::chrono::milliseconds>(as_duration(seconds)));
          },
          py::arg("work"), py::arg("seconds"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "over_process_groups",
      [](std::vector<ProcessGroupPtr> groups, Waits waits, const at::Device& device, std::vector<c10::Stream> streams,
         PairGroups pairs, Turns turns) {
        return over_process_groups(std::move(groups), device, std::move(streams), std::move(pairs), std::move(turns),
                                   std::move(waits));
      },
      py::arg("groups"), py::arg("waits"), py::arg("device") = at::Device(at::kCPU),
      py::arg("streams") = std::vector<c10::Stream>(), py::arg("pairs") = PairGroups(), py::arg("turns") = Turns());
}

void bind_executor(py::module_& m) {
  // for the test that compares it with Python's: words of a header, and the dtypes that it can name
  m.def("header_format", [] { return std::make_tuple(kHeaderWords, header_dtypes().vec()); });
  // for its test
  py::class_<PairClock>(m, "PairClock")
      .def(py::init<>())
      .def("next", &PairClock::next)
      .def("note", &PairClock::note, py::arg("seconds"));
  py::class_<Runner>(m, "Executor")
      .def(py::init(&make_runner), py::arg("rank"), py::arg("columns"), py::arg("channels"), py::arg("stages"),
           py::arg("transport"), py::arg("timeout"), py::arg("device") = at::Device(at::kCPU), py::arg("pairs") = 0,
           py::arg("streams") = std::vector<c10::Stream>())
      .def("pair_counts",
           [](const Runner& runner) {
             const PairCounts& counts = runner.pair_counts();
             return std::make_tuple(counts.together, counts.in_order, counts.fused, counts.in_turns);
           })
      .def("run", &Runner::run, py::arg("signature"), py::arg("announce"), py::arg("calls"), py::arg("on_failure"),
           py::arg("num_threads") = 0, py::arg("trace") = false, py::arg("drain") = false,
           py::arg("in_turns") = py::none(), py::arg("wait_at") = 0, py::arg("while_waiting") = py::none())
      .def("fail", &Runner::fail)
      .def("forget_failure", &Runner::forget_failure)
      .def("drop_memory", &Runner::drop_memory)
      .def("position", &Runner::position)
      .def("check", &Runner::check)
      .def("deferred", &deferred)
      .def("reached", &reached);
}

}  // namespace

}  // namespace fastpipe

PYBIND11_MODULE(_runtime, m) {
  using namespace fastpipe;
  m.doc() = "fastpipe's native runtime";
  py::register_local_exception_translator(translate);
  py::module_::import("atexit").attr("register")(py::cpp_function(&pause_ending_threads));

  bind_transports(m);
  bind_shared_memory(m);
  bind_copy_engine(m);
  bind_exchange(m);
  bind_weight_gradients(m);
  bind_random_numbers(m);
  bind_contexts(m);
  bind_executor(m);
}
