// torch's operators over CUDA on the host: the host's kernels, on memory of the device, run by its streams. What they
// return is allocated when they are called, as on a GPU; its shapes are those that the host's kernel gives for zeros.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/Generator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/PhiloxCudaState.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <limits>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "streams.h"

namespace {

using at::Tensor;
using c10::IValue;
using c10::OperatorHandle;
using c10::Stack;

const c10::DispatchKeySet kHost{c10::DispatchKey::CPU};

// What has no kernel, or must be torch's own, as it asks the runtime for something. Views are left alone, too.
const std::set<std::string> kTorchs{
    "copy_",         "empty",       "empty_strided",       "resize_",       "set_", "is_pinned",
    "record_stream", "_pin_memory", "_local_scalar_dense", "native_dropout"};
// What gives the host a value, or a tensor whose shape depends on one.
const std::set<std::string> kWait{"nonzero", "equal", "masked_select", "_unique2", "unique_dim", "unique_consecutive"};

Tensor view_of(const Tensor& tensor) {
  const auto options = tensor.options().device(at::kCPU).requires_grad(false);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
}

Tensor zeros_as(const Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU).requires_grad(false))
      .zero_();
}

// A number of the host's is taken when the call is made, an index too.
Tensor kept(const Tensor& tensor) {
  TORCH_CHECK(tensor.dim() == 0 || c10::isIntegralType(tensor.scalar_type(), true),
              "Expected all tensors to be on the same device, but a tensor of shape ", tensor.sizes(),
              " is on the CPU");
  if (tensor.dim() != 0) return tensor.clone();
  Tensor copy = tensor.clone();
  copy.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
  return copy;
}

using Change = std::function<Tensor(const Tensor&)>;

Tensor changed(const Tensor& tensor, const Change& change) {
  if (!tensor.defined()) return tensor;
  return tensor.is_cuda() ? change(tensor) : kept(tensor);
}

IValue changed(const IValue& value, const Change& change) {
  if (value.isTensor()) return changed(value.toTensor(), change);
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(changed(tensor, change));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor ? std::optional(changed(*tensor, change)) : std::nullopt);
    }
    return list;
  }
  if (value.isDevice()) return c10::Device(at::kCPU);
  return value;
}

// Random numbers of a call: those of a generator of the host's that is seeded by where the device's generator is, which
// a graph that is replayed reads from memory.
class Numbers {
 public:
  explicit Numbers(const std::optional<at::Generator>& given) {
    const at::Generator generator = given ? *given : at::cuda::detail::getDefaultCUDAGenerator();
    auto* state = at::check_generator<at::CUDAGeneratorImpl>(generator);
    const std::lock_guard<std::mutex> lock(state->mutex_);
    state_ = state->philox_cuda_state(4);
  }
  at::Generator generator() const {
    const std::uint64_t seed = state_.captured_ ? static_cast<std::uint64_t>(*state_.seed_.ptr) : state_.seed_.val;
    const std::uint64_t offset = state_.captured_
                                     ? static_cast<std::uint64_t>(*state_.offset_.ptr) + state_.offset_intragraph_
                                     : state_.offset_.val;
    return at::make_generator<at::CPUGeneratorImpl>(seed * 1000003 + offset);
  }

 private:
  at::PhiloxCudaState state_;
};

void put(std::function<void()> work) {
  const auto guarded = [work = std::move(work)] {
    const at::AutoDispatchBelowADInplaceOrView below;
    try {
      work();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "A kernel of CUDA on the host failed: %s\n", error.what());
      std::abort();
    }
  };
  C10_CUDA_CHECK(host_cuda::launch(c10::cuda::getCurrentCUDAStream().stream(), guarded));
}

Tensor device_like(const Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCUDA).requires_grad(false));
}

// A call of an operator.
class Call {
 public:
  Call(const OperatorHandle& op, Stack& stack)
      : op_(op), stack_(stack), given_(stack.end() - static_cast<std::ptrdiff_t>(num_arguments()), stack.end()) {
    for (std::size_t i = 0; i < num_arguments(); ++i) {
      const c10::Argument& argument = op.schema().arguments()[i];
      const bool writes = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
      if (writes && given_[i].isTensor()) written_.push_back(i);
      if (argument.type()->str().find("Generator") != std::string::npos) generator_ = i;
    }
  }

  void run() {
    Stack zeros = with(&zeros_as);
    if (generator_) zeros[*generator_] = at::make_generator<at::CPUGeneratorImpl>(0);
    const Stack before = zeros;
    op_.redispatchBoxed(kHost, &zeros);
    resize_written(before);
    const Stack results = allocate(zeros);
    std::vector<std::pair<std::size_t, Tensor>> made;
    for (std::size_t i = 0; i < results.size(); ++i) note_made(results[i], i, &made);
    put([op = op_, views = with(&view_of), made, generator = generator_, numbers = numbers()] {
      Stack stack = views;
      if (generator) stack[*generator] = numbers->generator();
      op.redispatchBoxed(kHost, &stack);
      std::vector<std::pair<std::size_t, Tensor>> found;
      for (std::size_t i = 0; i < stack.size(); ++i) list(stack[i], i, &found);
      std::size_t next = 0;
      for (const auto& [i, tensor] : found) {
        if (next < made.size() && made[next].first == i) Tensor(made[next++].second).copy_(tensor);
      }
    });
    give(results);
  }

  // That of the first tensor that is on one.
  std::optional<c10::Device> device() const {
    std::optional<c10::Device> found;
    const Change look = [&found](const Tensor& tensor) {
      if (!found) found = tensor.device();
      return tensor;
    };
    for (const IValue& value : given_) changed(value, look);
    return found;
  }

  // At once, when the stream has come so far.
  void run_and_wait() {
    c10::cuda::stream_synchronize(c10::cuda::getCurrentCUDAStream());
    Stack results = with(&view_of);
    op_.redispatchBoxed(kHost, &results);
    for (IValue& value : results) {
      if (!value.isTensor() || !value.toTensor().defined()) continue;
      const Tensor made = device_like(value.toTensor());
      view_of(made).copy_(value.toTensor());
      value = made;
    }
    give(results);
  }

 private:
  std::size_t num_arguments() const { return op_.schema().arguments().size(); }

  Stack with(const Change& change) const {
    Stack stack;
    for (const IValue& value : given_) stack.push_back(changed(value, change));
    return stack;
  }

  std::shared_ptr<Numbers> numbers() const {
    if (!generator_) return nullptr;
    const IValue& given = given_[*generator_];
    return std::make_shared<Numbers>(given.isNone() ? std::nullopt : std::optional(given.toGenerator()));
  }

  // `out=` tensors of another shape get the one that the results have.
  void resize_written(const Stack& zeros) const {
    for (const std::size_t i : written_) {
      const Tensor& like = zeros[i].toTensor();
      const Tensor& own = given_[i].toTensor();
      if (own.defined() && own.sizes() != like.sizes()) own.resize_(like.sizes());
    }
  }

  // In place of what the host's kernel gave for zeros: memory of the device, or the arguments that are returned.
  Stack allocate(const Stack& like) const {
    Stack results;
    std::size_t next = 0;
    for (std::size_t i = 0; i < like.size(); ++i) {
      const bool alias = op_.schema().returns()[i].alias_info() != nullptr;
      results.push_back(alias ? given_[written_[next++]] : changed_on_device(like[i]));
    }
    return results;
  }

  static IValue changed_on_device(const IValue& value) {
    if (value.isTensor()) return value.toTensor().defined() ? device_like(value.toTensor()) : value.toTensor();
    if (!value.isTensorList()) return value;
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(device_like(tensor));
    return list;
  }

  static void list(const IValue& value, std::size_t i, std::vector<std::pair<std::size_t, Tensor>>* into) {
    if (value.isTensor() && value.toTensor().defined()) into->emplace_back(i, value.toTensor());
    if (!value.isTensorList()) return;
    for (const Tensor& tensor : value.toTensorVector()) into->emplace_back(i, tensor);
  }

  // What has to be filled.
  void note_made(const IValue& value, std::size_t i, std::vector<std::pair<std::size_t, Tensor>>* made) const {
    if (op_.schema().returns()[i].alias_info() != nullptr) return;
    const std::size_t from = made->size();
    list(value, i, made);
    for (std::size_t j = from; j < made->size(); ++j) (*made)[j].second = view_of((*made)[j].second);
  }

  void give(const Stack& results) {
    stack_.erase(stack_.end() - static_cast<std::ptrdiff_t>(num_arguments()), stack_.end());
    stack_.insert(stack_.end(), results.begin(), results.end());
  }

  const OperatorHandle& op_;
  Stack& stack_;
  const Stack given_;
  std::vector<std::size_t> written_;
  std::optional<std::size_t> generator_;
};

std::string short_name(const OperatorHandle& op) {
  return op.schema().name().substr(std::string("aten::").size());
}

const c10::DispatchKeySet kAutocast = c10::autocast_dispatch_keyset;

void on_host(const OperatorHandle& op, Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::impl::ExcludeDispatchKeyGuard as_it_is(kAutocast);
  Call call(op, *stack);
  const c10::cuda::OptionalCUDAGuard guard(call.device());
  kWait.count(short_name(op)) != 0 ? call.run_and_wait() : call.run();
}

Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  const bool plain = to.scalar_type() == from.scalar_type() && to.sizes() == from.sizes() &&
                     to.strides() == from.strides() && to.is_non_overlapping_and_dense();
  if (!to.is_cuda() || !from.is_cuda() || plain || to.numel() == 0) return at::native::copy_(to, from, non_blocking);
  const c10::cuda::CUDAGuard guard(to.device());
  put([to = view_of(to), from = view_of(from.expand_as(to))] { Tensor(to).copy_(from); });
  return to;
}

// The host's kernel asks nobody but the default generator.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  const c10::cuda::CUDAGuard guard(input.device());
  const Tensor output = at::empty_like(input);
  const Tensor mask = at::empty_like(input, input.options().dtype(at::kBool));
  const double kept = train.value_or(true) ? 1.0 - p : 1.0;
  put([input = view_of(input), output = view_of(output), mask = view_of(mask), kept, numbers = Numbers(std::nullopt)] {
    Tensor(mask).bernoulli_(kept, numbers.generator());
    at::mul_out(const_cast<Tensor&>(output), input, mask);
    Tensor(output).mul_(kept == 0.0 ? 0.0 : 1.0 / kept);
  });
  return {output, mask};
}

// By its formula, as the host has no kernel for its backward.
std::tuple<Tensor, Tensor> rms_norm(const Tensor& input, at::IntArrayRef shape, const std::optional<Tensor>& weight,
                                    std::optional<double> eps) {
  std::vector<std::int64_t> dims(shape.size());
  std::iota(dims.begin(), dims.end(), input.dim() - static_cast<std::int64_t>(shape.size()));
  const double least = eps.value_or(std::numeric_limits<float>::epsilon());
  const Tensor scale = input.square().mean(dims, /*keepdim=*/true).add(least).rsqrt();
  const Tensor normed = input.mul(scale);
  return {weight && weight->defined() ? normed.mul(*weight) : normed, scale};
}

bool is_view(const c10::FunctionSchema& schema) {
  for (const c10::Argument& given : schema.returns()) {
    if (given.alias_info() != nullptr && !given.alias_info()->isWrite()) return true;
  }
  return false;
}

bool is_ours(const OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CUDA) &&
         op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU) && !is_view(op.schema()) &&
         kTorchs.count(short_name(op)) == 0;
}

// That kernels are replaced is the purpose.
struct Silence final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  Silence silence;
  const c10::WarningUtils::WarningHandlerGuard guard(&silence);
  // Attention by its formula, convolutions by torch's own kernels.
  at::globalContext().setUserEnabledCuDNN(false);
  at::globalContext().setSDPUseFlash(false);
  at::globalContext().setSDPUseMemEfficient(false);
  at::globalContext().setSDPUseCuDNN(false);
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || !is_ours(*op)) continue;
    const std::string full = short_name(*op) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&on_host>());
  }
  library.impl("copy_", &copy_);
  library.impl("native_dropout", &native_dropout);
}

TORCH_LIBRARY_IMPL(aten, AutogradCUDA, library) {
  Silence silence;
  const c10::WarningUtils::WarningHandlerGuard guard(&silence);
  library.impl("_fused_rms_norm", &rms_norm);
}

}  // namespace
