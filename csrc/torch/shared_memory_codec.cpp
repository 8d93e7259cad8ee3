#include "shared_memory_codec.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "bytes.h"
#include "core/errors.h"

namespace fastpipe {

namespace {

using Words = std::vector<std::int64_t>;
constexpr std::int64_t kFields = 3;  // dtype, requires_grad, number of dimensions; then sizes and strides

// The number of words, itself included, comes first. dtypes are torch's own numbers: both ends run the same torch.
Words encode(const std::vector<at::Tensor>& tensors) {
  Words words{0, static_cast<std::int64_t>(tensors.size())};
  for (const at::Tensor& tensor : tensors) {
    words.insert(words.end(),
                 {static_cast<std::int64_t>(tensor.scalar_type()), std::int64_t{tensor.requires_grad()}, tensor.dim()});
    words.insert(words.end(), tensor.sizes().begin(), tensor.sizes().end());
    words.insert(words.end(), tensor.strides().begin(), tensor.strides().end());
  }
  words.front() = static_cast<std::int64_t>(words.size());
  return words;
}

std::size_t header_size(const std::vector<at::Tensor>& tensors) {
  std::size_t words = 2;
  for (const at::Tensor& tensor : tensors) words += kFields + 2 * static_cast<std::size_t>(tensor.dim());
  return whole_lines(words * sizeof(std::int64_t));
}

[[noreturn]] void refuse() {
  throw Error("a message in shared memory cannot be read; run the same version of fastpipe on every rank");
}

class Reader {
 public:
  explicit Reader(const CellBytes& from)
      : words_(reinterpret_cast<const std::int64_t*>(from.data)), size_(from.size / sizeof(std::int64_t)) {}

  c10::IntArrayRef next(std::int64_t count) {
    if (count < 0 || static_cast<std::size_t>(count) > size_ - at_) refuse();
    const c10::IntArrayRef part(words_ + at_, static_cast<std::size_t>(count));
    at_ += part.size();
    return part;
  }

 private:
  const std::int64_t* words_;
  std::size_t size_;
  std::size_t at_ = 0;
};

// A message's lease, which its tensors share.
struct SharedLease final : c10::intrusive_ptr_target {
  explicit SharedLease(SharedMemoryLease lease) : lease(std::move(lease)) {}

  static void let_go(void* one) { c10::intrusive_ptr<SharedLease>::reclaim(static_cast<SharedLease*>(one)); }

  const SharedMemoryLease lease;
};
using LeasePtr = c10::intrusive_ptr<SharedLease>;

at::Tensor tensor_at(std::byte* data, const TensorSpec& spec, const LeasePtr& lease) {
  at::Tensor tensor = at::for_blob(data, spec.sizes)
                          .strides(spec.strides)
                          .context(LeasePtr(lease).release(), SharedLease::let_go)
                          .options(at::TensorOptions().dtype(spec.dtype))
                          .make_tensor();
  if (spec.requires_grad) tensor.set_requires_grad(true);
  return tensor;
}

at::Tensor copy_on(at::Device device, const std::byte* data, const TensorSpec& spec) {
  at::Tensor tensor = at::empty_strided(spec.sizes, spec.strides, at::TensorOptions().dtype(spec.dtype).device(device));
  if (tensor.nbytes() > 0) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    bytes_at(tensor.const_data_ptr(), tensor.nbytes(), device).copy_(bytes_at(data, tensor.nbytes(), at::kCPU));
  }
  if (spec.requires_grad) tensor.set_requires_grad(true);
  return tensor;
}

const std::vector<at::Tensor>& tensors_of(const Payload& payload) {
  return static_cast<const TensorPayload&>(payload).tensors();
}

}  // namespace

std::size_t TensorCodec::size(const Payload& payload, bool announced) const {
  std::size_t bytes = announced ? header_size(tensors_of(payload)) : 0;
  for (const at::Tensor& tensor : tensors_of(payload)) bytes += whole_lines(tensor.nbytes());
  return bytes;
}

void TensorCodec::write(const Payload& payload, const CellBytes& to) const {
  std::byte* at = to.data;
  if (to.announced) {
    const Words words = encode(tensors_of(payload));
    std::memcpy(at, words.data(), words.size() * sizeof(std::int64_t));
    at += header_size(tensors_of(payload));
  }
  for (const at::Tensor& tensor : tensors_of(payload)) {
    if (tensor.nbytes() > 0) write_one(tensor, at);
    at += whole_lines(tensor.nbytes());
  }
}

void TensorCodec::write_one(const at::Tensor& tensor, std::byte* to) const {
  if (device_.is_cpu()) {
    std::memcpy(to, tensor.const_data_ptr(), tensor.nbytes());
    return;
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  bytes_at(to, tensor.nbytes(), at::kCPU).copy_(bytes_at(tensor.const_data_ptr(), tensor.nbytes(), device_));
}

std::unique_ptr<Spec> TensorCodec::read_spec(const CellBytes& from) const {
  Reader reader(from);
  const std::int64_t count = reader.next(2)[1];
  std::vector<TensorSpec> specs;
  for (std::int64_t tensor = 0; tensor < count; ++tensor) {
    const c10::IntArrayRef fields = reader.next(kFields);
    if (fields[0] < 0 || fields[0] >= static_cast<std::int64_t>(at::ScalarType::NumOptions)) refuse();
    const c10::IntArrayRef sizes = reader.next(fields[2]);
    const c10::IntArrayRef strides = reader.next(fields[2]);
    specs.emplace_back(static_cast<at::ScalarType>(fields[0]), fields[1] != 0, sizes, strides);
  }
  return std::make_unique<TensorListSpec>(std::move(specs));
}

void TensorCodec::adopt(Payload& into, const Spec& spec, const CellBytes& from, SharedMemoryLease lease) const {
  auto& payload = static_cast<TensorPayload&>(into);
  const std::vector<TensorSpec>& specs = static_cast<const TensorListSpec&>(spec).tensors();
  std::size_t at = from.announced ? whole_lines(static_cast<std::size_t>(Reader(from).next(1)[0]) * 8) : 0;
  std::size_t end = at;
  for (const TensorSpec& tensor : specs) end += whole_lines(bytes_of(tensor));
  if (end != from.size) refuse();
  payload.clear();
  const auto shared = c10::make_intrusive<SharedLease>(std::move(lease));
  // In a step under inference mode they would become inference tensors, which a training step cannot use.
  const c10::InferenceMode normal(false);
  for (const TensorSpec& tensor : specs) {
    payload.add(device_.is_cpu() ? tensor_at(from.data + at, tensor, shared)
                                 : copy_on(device_, from.data + at, tensor));
    at += whole_lines(bytes_of(tensor));
  }
  if (!device_.is_cpu()) payload.filled();  // it may be another stage's turn than the consumer's
}

}  // namespace fastpipe
