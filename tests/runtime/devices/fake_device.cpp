// A device whose memory is the host's and whose work is done at once, but which keeps account (account.h) of what a GPU
// would not have done yet. One translation unit, as torch's headers cost ten seconds each time.
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "fake_engine.h"
#include "fake_group.h"
#include "fake_state.h"

namespace fake_device {

namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kFake; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return to_stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return to_stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return to_stream(account().new_stream()); }
  c10::Stream getNewStream(c10::Device, int) const override { return to_stream(account().new_stream()); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return to_stream(std::exchange(current_stream, number_of(stream)));
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    *static_cast<Event*>(*event) = account().recorded(number_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) account().blocked(number_of(stream), *static_cast<Event*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryEvent(void* event) const override { return static_cast<Event*>(event)->time <= Time::now(); }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    const auto between = static_cast<Event*>(to)->time - static_cast<Event*>(from)->time;
    return std::chrono::duration<double, std::milli>(between).count();
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeEvent(void* event) const override {
    account().host_waits(*static_cast<Event*>(event), "synchronizeEvent");
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    account().host_waits(number_of(stream), "synchronizeStream");
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    for (std::size_t i = 0; i < kMaxStreams; ++i) account().host_waits(i, "synchronizeDevice");
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    account().used_on(data.get(), number_of(stream));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

void release(void* data) {
  if (data == nullptr) return;
  account().freed(data);
  std::free(data);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(std::size_t size) override {
    void* data = nullptr;
    if (size != 0) {
      data = std::aligned_alloc(64, (size + 63) / 64 * 64);
      account().allocated(data, size, current_stream);
    }
    return {data, data, &release, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
};

Memory memory;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &memory);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  void init() const override {}
  // All of the host's memory is as good as any.
  c10::Allocator* getPinnedMemoryAllocator() const override { return at::getCPUAllocator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static const at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
    return generator;
  }
};

bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kFake;
}

void touch(const at::Tensor& tensor, bool writes, const std::string& by) {
  account().used(current_stream);
  if (tensor.numel() != 0) account().touched(tensor.const_data_ptr(), writes, current_stream, by);
}

at::Tensor to_device(const at::Tensor& tensor, const std::string& by) {
  if (!tensor.defined() || tensor.device() != at::kCPU) return tensor;
  const at::Tensor made =
      at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(kDevice).requires_grad(false));
  touch(made, true, by);
  if (made.numel() != 0) host_view(made).copy_(tensor);
  return made;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  account().worked(current_stream);
  for (const auto& [tensor, writes] : {std::pair(from, false), std::pair(to, true)}) {
    if (on_device(tensor)) touch(tensor, writes, "copy_");
  }
  if ((!on_device(from) || !on_device(to)) && !non_blocking) {
    account().host_waits(current_stream, on_device(from) ? "copy to the host" : "copy from the host");
  }
  const auto work = [from, to] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    (on_device(to) ? host_view(to) : to).copy_(on_device(from) ? host_view(from) : from);
  };
  if (tape != nullptr) tape.load()->note(work);
  work();
  return to;
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const auto type = dtype.value_or(at::kFloat);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type, format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(strides), &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           dtype.value_or(at::kFloat));
}

void record_stream(at::Tensor& tensor, at::Stream stream) {
  account().used_on(tensor.const_data_ptr(), number_of(stream));
}

// A call of an operator by the host's kernel, on the memory of the device's tensors, with an account of it.
class HostCall {
 public:
  HostCall(const c10::OperatorHandle& op, c10::Stack& stack)
      : op_(op), stack_(stack), begin_(stack.size() - op.schema().arguments().size()) {}

  void run() {
    const auto& arguments = op_.schema().arguments();
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const auto* alias = arguments[i].alias_info();
      take(stack_[begin_ + i], alias != nullptr && alias->isWrite());
    }
    if (gives_host_a_value()) account().host_waits(current_stream, name());
    const c10::Stack given(stack_.begin() + static_cast<std::ptrdiff_t>(begin_), stack_.end());
    op_.callBoxed(&stack_);
    // what is returned stands where the arguments did
    for (std::size_t i = 0; i < op_.schema().returns().size(); ++i) give_back(stack_[begin_ + i], i);
    if (tape != nullptr) note(given);
  }

 private:
  const std::string& name() const { return op_.schema().name(); }

  bool gives_host_a_value() const {
    return name() == "aten::_local_scalar_dense" || name() == "aten::equal" || name() == "aten::nonzero";
  }

  void take(c10::IValue& value, bool writes) {
    if (value.isTensor()) {
      if (writes) written_.push_back(value.toTensor());
      value = on_host(value.toTensor(), writes);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(on_host(tensor, writes));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor ? std::optional(on_host(*tensor, writes)) : std::nullopt);
      }
      value = list;
    } else if (value.isDevice()) {
      value = c10::Device(at::kCPU);
    }
  }

  at::Tensor on_host(const at::Tensor& tensor, bool writes) {
    if (!on_device(tensor)) return tensor;
    touch(tensor, writes, name());
    kept_.push_back(tensor);
    return host_view(tensor);
  }

  void give_back(c10::IValue& value, std::size_t i) {
    if (op_.schema().returns()[i].alias_info() != nullptr) {
      value = written_[i];  // an in-place or out= operator
    } else if (value.isTensor()) {
      value = to_device(value.toTensor(), name());
      if (value.toTensor().defined()) made_[i] = value.toTensor();
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(to_device(tensor, name()));
      value = list;
    }
  }

  void note(const c10::Stack& given) const {
    tape.load()->note([op = op_, given, made = made_, kept = kept_] {
      const at::AutoDispatchBelowADInplaceOrView guard;
      c10::Stack again = given;
      op.callBoxed(&again);
      for (const auto& [i, tensor] : made) host_view(tensor).copy_(again[i].toTensor());
    });
  }

  const c10::OperatorHandle& op_;
  c10::Stack& stack_;
  std::size_t begin_;
  std::vector<at::Tensor> written_;
  std::map<std::size_t, at::Tensor> made_;
  std::vector<at::Tensor> kept_;  // the memory behind the views
};

// Everything else.
void on_host(const c10::OperatorHandle& op, c10::Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  account().worked(current_stream);
  HostCall(op, *stack).run();
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("_copy_from", &copy_from);
  library.impl("record_stream", &record_stream);
  // whole, as torch's way over the out= operator would resize memory
  library.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&on_host>());
}

// fastpipe's linear, which may leave its weight for W: it is registered for the devices that torch itself knows, and
// asks nothing of a CPU.
void linear(const c10::OperatorHandle& op, c10::DispatchKeySet, c10::Stack* stack) {
  const bool loaded = op.hasKernelForDispatchKey(c10::DispatchKey::AutogradCPU);
  op.callBoxedForDispatchKey(loaded ? c10::DispatchKey::AutogradCPU : c10::DispatchKey::CompositeImplicitAutograd,
                             *stack);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  library.impl("linear", torch::CppFunction::makeFromBoxedFunction<&linear>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>());
}

// As a CUDA graph, on the current stream.
struct Recording : Tape {
  void begin() {
    account().begin_recording(current_stream);
    tape = this;
  }
  void end() {
    tape = nullptr;
    account().end_recording();
  }
};

}  // namespace

}  // namespace fake_device

PYBIND11_MODULE(fake_device, module) {
  using namespace fake_device;
  pybind11::class_<Recording>(module, "Recording")
      .def(pybind11::init<>())
      .def("begin", &Recording::begin)
      .def("end", &Recording::end)
      .def("replay", &Recording::replay, pybind11::call_guard<pybind11::gil_scoped_release>());
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  module.def("add_device", &add_device);
  // Its base is a class of fastpipe's own library, which must be loaded first.
  module.def("bind_engine", [module]() mutable {
    pybind11::class_<FakeEngine, fastpipe::CopyEngine, std::shared_ptr<FakeEngine>>(module, "Engine")
        .def(pybind11::init<>());
  });
  module.def("reset", [] {
    account().reset();
    operations.clear();
  });
  module.def("operations", [] { return operations; });
  module.def("set_seconds_per_operation", [](double seconds) { account().set_seconds(seconds); });
  module.def("races", [] { return account().races(); });
  module.def("faults", [] { return account().faults(); });
  module.def("host_waits", [] { return account().waits(); });
  module.def("num_streams", [] { return account().num_streams(); });
  module.def("num_events", [] { return account().num_events(); });
}
