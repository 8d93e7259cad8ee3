#include "codec.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <utility>

#include "core/common.h"
#include "payload.h"

namespace fastpipe {

void append_words(std::vector<std::int64_t>& words, const TensorSpec& spec, std::int64_t dtype) {
  words.insert(words.end(), {dtype, spec.requires_grad, static_cast<std::int64_t>(spec.sizes.size())});
  words.insert(words.end(), spec.sizes.begin(), spec.sizes.end());
  words.insert(words.end(), spec.strides.begin(), spec.strides.end());
}

std::vector<TensorSpec> WordReader::specs(std::int64_t count, DtypeOf* dtype_of) {
  std::vector<TensorSpec> found;
  for (std::int64_t tensor = 0; tensor < count; ++tensor) {
    const at::ScalarType dtype = dtype_of(next());
    const bool requires_grad = next() != 0;
    const std::int64_t dimensions = next();
    const c10::IntArrayRef sizes = next(dimensions);
    found.emplace_back(dtype, requires_grad, sizes, next(dimensions));
  }
  return found;
}

c10::IntArrayRef WordReader::next(std::int64_t count) {
  if (count < 0 || static_cast<std::size_t>(count) > words_.size()) refuse_unreadable();
  const c10::IntArrayRef found = words_.slice(0, static_cast<std::size_t>(count));
  words_ = words_.slice(found.size());
  return found;
}

void refuse_unreadable() {
  throw Error("a message from another rank cannot be read; run the same version of fastpipe on every rank");
}

namespace {

constexpr std::int64_t kStandIn = 0;
constexpr std::int64_t kGood = 1;

constexpr std::array<at::ScalarType, 20> kDtypes = {
    at::kFloat,
    at::kDouble,
    at::kHalf,
    at::kBFloat16,
    at::kLong,
    at::kInt,
    at::kShort,
    at::kChar,
    at::kByte,
    at::kBool,
    at::kComplexFloat,
    at::kComplexDouble,
    at::kUInt16,
    at::kUInt32,
    at::kUInt64,
    at::kComplexHalf,
    at::kFloat8_e4m3fn,
    at::kFloat8_e5m2,
    at::kFloat8_e4m3fnuz,
    at::kFloat8_e5m2fnuz,
};

std::int64_t number_of(at::ScalarType dtype) {
  const auto* found = std::find(kDtypes.begin(), kDtypes.end(), dtype);
  if (found != kDtypes.end()) return std::distance(kDtypes.begin(), found);
  throw ArgumentError(std::string("a message to another stage has a tensor of ") + c10::toString(dtype) +
                      ", which cannot be sent: convert it to an ordinary floating-point, complex, integer or bool "
                      "dtype, such as torch.float32");
}

at::ScalarType dtype_of(std::int64_t number) {
  if (number < 0 || static_cast<std::size_t>(number) >= kDtypes.size()) refuse_unreadable();
  return kDtypes[static_cast<std::size_t>(number)];
}

}  // namespace

c10::ArrayRef<at::ScalarType> header_dtypes() {
  return kDtypes;
}

Header encode_header(const std::vector<TensorSpec>& specs) {
  std::vector<std::int64_t> words{kGood, static_cast<std::int64_t>(specs.size())};
  for (const TensorSpec& spec : specs) append_words(words, spec, number_of(spec.dtype));
  if (words.size() > kHeaderWords) {
    throw ArgumentError("a message to another stage has " + std::to_string(specs.size()) +
                        " tensors, more than a header describes; join some of them");
  }
  Header header{};
  std::copy(words.begin(), words.end(), header.begin());
  return header;
}

Header stand_in_header() {
  Header header{};
  header[0] = kStandIn;
  return header;
}

bool is_stand_in(const Header& header) {
  return header[0] == kStandIn;
}

std::vector<TensorSpec> decode_header(const Header& header) {
  WordReader reader(header);
  reader.next();
  const std::int64_t count = reader.next();
  return reader.specs(count, dtype_of);
}

namespace {

using Words = std::vector<std::int64_t>;

// The number of words, itself included, comes first. dtypes are torch's own numbers: both ends run the same torch.
Words encode(const std::vector<at::Tensor>& tensors) {
  Words words{0, static_cast<std::int64_t>(tensors.size())};
  for (const at::Tensor& tensor : tensors) {
    append_words(words, TensorSpec(tensor), static_cast<std::int64_t>(tensor.scalar_type()));
  }
  words.front() = static_cast<std::int64_t>(words.size());
  return words;
}

std::size_t header_size(const std::vector<at::Tensor>& tensors) {
  std::size_t words = 2;
  for (const at::Tensor& tensor : tensors) words += num_words(tensor);
  return whole_lines(words * sizeof(std::int64_t));
}

at::ScalarType dtype_at(std::int64_t number) {
  if (number < 0 || number >= static_cast<std::int64_t>(at::ScalarType::NumOptions)) refuse_unreadable();
  return static_cast<at::ScalarType>(number);
}

WordReader reader_of(const CellBytes& from) {
  return WordReader({reinterpret_cast<const std::int64_t*>(from.data), from.size / sizeof(std::int64_t)});
}

// A message's lease, which its tensors share.
struct SharedLease final : c10::intrusive_ptr_target {
  explicit SharedLease(SharedMemoryLease lease) : lease(std::move(lease)) {}

  static void release(void* one) { c10::intrusive_ptr<SharedLease>::reclaim(static_cast<SharedLease*>(one)); }

  const SharedMemoryLease lease;
};
using LeasePtr = c10::intrusive_ptr<SharedLease>;

at::Tensor tensor_at(std::byte* data, const TensorSpec& spec, const LeasePtr& lease) {
  return at::for_blob(data, spec.sizes)
      .strides(spec.strides)
      .context(LeasePtr(lease).release(), SharedLease::release)
      .options(at::TensorOptions().dtype(spec.dtype))
      .make_tensor()
      .set_requires_grad(spec.requires_grad);
}

at::Tensor copy_on(at::Device device, const std::byte* data, const TensorSpec& spec) {
  const auto options = at::TensorOptions().dtype(spec.dtype).device(device);
  const at::Tensor tensor = at::empty_strided(spec.sizes, spec.strides, options);
  if (tensor.nbytes() > 0) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    bytes_at(tensor.const_data_ptr(), tensor.nbytes(), device).copy_(bytes_at(data, tensor.nbytes(), at::kCPU));
  }
  return tensor.set_requires_grad(spec.requires_grad);
}

at::Tensor tensor_in(const CopyLoan& loan, std::size_t offset, const TensorSpec& spec, at::Device device) {
  return at::for_blob(loan.data() + offset, spec.sizes)
      .strides(spec.strides)
      .deleter([memory = loan.memory()](void*) {})
      .options(at::TensorOptions().dtype(spec.dtype).device(device))
      .target_device(device)
      .make_tensor()
      .set_requires_grad(spec.requires_grad);
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
  WordReader reader = reader_of(from);
  reader.next();
  const std::int64_t count = reader.next();
  return std::make_unique<TensorListSpec>(reader.specs(count, dtype_at));
}

void TensorCodec::adopt(Payload& into, const Spec& spec, const CellBytes& from, SharedMemoryLease lease) const {
  auto& payload = static_cast<TensorPayload&>(into);
  const std::vector<TensorSpec>& specs = specs_in(spec);
  std::size_t at =
      from.announced ? whole_lines(static_cast<std::size_t>(reader_of(from).next()) * sizeof(std::int64_t)) : 0;
  std::size_t end = at;
  for (const TensorSpec& tensor : specs) end += whole_lines(bytes_of(tensor));
  if (end != from.size) refuse_unreadable();
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

std::size_t TensorCodec::size(const Spec& spec) const {
  std::size_t bytes = 0;
  for (const TensorSpec& tensor : specs_in(spec)) {
    bytes += whole_blocks(bytes_of(tensor));
  }
  return bytes;
}

void TensorCodec::list(const Payload& payload, std::vector<CopyPart>& parts) const {
  for (const at::Tensor& tensor : tensors_of(payload)) {
    const std::size_t bytes = tensor.nbytes();
    parts.push_back({bytes == 0 ? nullptr : static_cast<const std::byte*>(tensor.const_data_ptr()), bytes});
  }
}

std::shared_ptr<const void> TensorCodec::duplicate(std::vector<CopyPart>& parts) const {
  const at::AutoDispatchBelowADInplaceOrView guard;
  auto copies = std::make_shared<std::vector<at::Tensor>>();
  for (CopyPart& part : parts) {
    if (part.bytes == 0) continue;
    copies->push_back(bytes_at(part.data, part.bytes, device_).clone());
    part.data = static_cast<const std::byte*>(copies->back().const_data_ptr());
  }
  return copies;
}

void TensorCodec::adopt(Payload& into, const Spec& spec, CopyLoan loan) const {
  auto& payload = static_cast<TensorPayload&>(into);
  payload.clear();
  // In a step under inference mode they would become inference tensors, which a training step cannot use.
  const c10::InferenceMode normal(false);
  std::size_t at = 0;
  for (const TensorSpec& tensor : specs_in(spec)) {
    payload.add(tensor_in(loan, at, tensor, device_));
    at += whole_blocks(bytes_of(tensor));
  }
  payload.borrow(std::move(loan));
}

}  // namespace fastpipe
