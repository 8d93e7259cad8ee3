#include "payload.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <utility>

#include "core/common.h"
#include "torch_private.h"

namespace fastpipe {

namespace {

std::string text(c10::IntArrayRef numbers) {
  std::string out = "(";
  for (std::size_t i = 0; i < numbers.size(); ++i) out += (i == 0 ? "" : ", ") + std::to_string(numbers[i]);
  return out + ")";
}

// The stride of a dimension of size 1 is never used, and torch's operators do not agree on it.
bool same_strides(c10::IntArrayRef sizes, c10::IntArrayRef one, c10::IntArrayRef other) {
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return true;
    if (sizes[i] != 1 && one[i] != other[i]) return false;
  }
  return true;
}

void require_plain(const at::Tensor& tensor) {
  const char* what = nullptr;
  if (!tensor.defined()) {
    what = "an undefined tensor";
  } else if (has_python_dispatch(tensor)) {
    what = "a tensor subclass with its own dispatch";
  } else if (tensor.layout() != at::kStrided || tensor.is_nested() || tensor.is_quantized()) {
    what = "a sparse, nested or quantized tensor";
  }
  if (what == nullptr) return;
  throw ArgumentError(std::string("a stage gave ") + what +
                      " to another rank, which can take plain dense tensors only; convert it in the stage");
}

// Dense memory in the order of the strides; a copy only where there are gaps, overlaps or lazy bits.
at::Tensor packed(const at::Tensor& tensor) {
  require_plain(tensor);
  if (tensor.is_non_overlapping_and_dense() && !tensor.is_conj() && !tensor.is_neg()) return tensor;
  const c10::AutoGradMode no_graph(false);
  at::Tensor dense = tensor.resolve_conj().resolve_neg();
  if (!dense.is_non_overlapping_and_dense()) dense = dense.clone();
  return dense.detach().set_requires_grad(tensor.requires_grad());
}

// Gives a storage other memory with the same bytes. Its tensors and views go on with that.
void move_out(const c10::Storage& storage) {
  if (storage.nbytes() == 0) return;
  const at::AutoDispatchBelowADInplaceOrView guard;
  const at::Tensor old = bytes_at(storage.data(), storage.nbytes(), storage.device());
  const at::Tensor own = at::empty_like(old);
  own.copy_(old);
  storage.set_data_ptr(own.storage().set_data_ptr(at::DataPtr(nullptr, storage.device())));
}

}  // namespace

std::size_t bytes_of(const TensorSpec& spec) {
  std::size_t bytes = c10::elementSize(spec.dtype);
  for (const std::int64_t size : spec.sizes) bytes *= static_cast<std::size_t>(size);
  return bytes;
}

TensorSpec::TensorSpec(const at::Tensor& tensor)
    : TensorSpec(tensor.scalar_type(), tensor.requires_grad(), tensor.sizes(), tensor.strides()) {}

TensorSpec::TensorSpec(at::ScalarType dtype, bool requires_grad, c10::IntArrayRef sizes, c10::IntArrayRef strides)
    : dtype(dtype),
      requires_grad(requires_grad),
      sizes(sizes.begin(), sizes.end()),
      strides(strides.begin(), strides.end()) {}

bool TensorSpec::matches(const at::Tensor& tensor) const {
  return tensor.scalar_type() == dtype && tensor.requires_grad() == requires_grad && tensor.sizes() == sizes &&
         same_strides(sizes, tensor.strides(), strides);
}

std::string TensorSpec::text() const {
  return std::string(c10::toString(dtype)) + fastpipe::text(sizes) + " with strides " + fastpipe::text(strides) +
         (requires_grad ? ", requires_grad" : "");
}

std::string TensorListSpec::text() const {
  std::string out = std::to_string(tensors_.size()) + (tensors_.size() == 1 ? " tensor [" : " tensors [");
  for (std::size_t i = 0; i < tensors_.size(); ++i) out += (i == 0 ? "" : "; ") + tensors_[i].text();
  return out + "]";
}

const std::vector<at::Tensor>& TensorPayload::taken_in() const {
  if (made_.recorded()) {
    made_.wait();
    for (const at::Tensor& tensor : tensors_) keep_for_current_stream(tensor.storage().data_ptr());
  }
  return tensors_;
}

void TensorPayload::clear() noexcept {
  try {
    // Before the memory goes back: where it is another stream's, the allocator waits for what this one has by then.
    read_.wait();
    tensors_.clear();
    end_loan();
    note_idle();
  } catch (...) {
    // The device is broken, and says so to whoever uses it next.
    tensors_.clear();
  }
  read_.forget();
  made_.forget();
}

void TensorPayload::borrow(CopyLoan loan) {
  loan_ = std::move(loan);
  for (const at::Tensor& tensor : tensors_) lent_.push_back(tensor.storage());
}

void TensorPayload::end_loan() {
  if (!loan_.active()) return;
  for (const c10::Storage& storage : lent_) {
    if (storage.use_count() > 1) move_out(storage);
  }
  lent_.clear();
  loan_.end();
}

void TensorPayload::note_idle() {
  if (device_.is_cpu() || fenced_ || idle_ || buffers_.empty()) return;
  for (const at::Tensor& buffer : buffers_) {
    if (!buffer.defined() || buffer.storage().use_count() != 1) return;
  }
  free_.record(device_);
  idle_ = true;
}

void TensorPayload::pack() {
  for (at::Tensor& tensor : tensors_) tensor = packed(tensor);
  filled();  // by the copies, too
}

void TensorPayload::copy_from(const Payload& source) {
  clear();
  // Below autograd: neither the caller's grad nor its inference mode concerns the bytes.
  const at::AutoDispatchBelowADInplaceOrView guard;
  const auto& from = static_cast<const TensorPayload&>(source);
  const std::vector<at::Tensor>& tensors = from.tensors_;
  from.made_.wait();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    buffer(i, TensorSpec(tensors[i])).copy_(tensors[i]);
    expose_one(i, tensors[i].requires_grad());
  }
  filled();
  if (fenced_) from.read_.record(device_);
}

std::unique_ptr<Spec> TensorPayload::spec() const {
  std::vector<TensorSpec> specs;
  for (const at::Tensor& tensor : tensors_) specs.emplace_back(tensor);
  return std::make_unique<TensorListSpec>(std::move(specs));
}

bool TensorPayload::matches(const Spec& spec) const {
  const std::vector<TensorSpec>& specs = specs_in(spec);
  return std::equal(specs.begin(), specs.end(), tensors_.begin(), tensors_.end(),
                    [](const TensorSpec& spec, const at::Tensor& tensor) { return spec.matches(tensor); });
}

const std::vector<at::Tensor>& TensorPayload::prepare(const std::vector<TensorSpec>& specs) {
  clear();
  for (std::size_t i = 0; i < specs.size(); ++i) buffer(i, specs[i]);
  buffers_.resize(specs.size());
  // Memory that a graph held, or that is new, may be in use by all that this stream has.
  if (!device_.is_cpu() && !idle_) free_.record(device_);
  idle_ = false;
  return buffers_;
}

void TensorPayload::expose(const std::vector<TensorSpec>& specs) {
  for (std::size_t i = 0; i < specs.size(); ++i) expose_one(i, specs[i].requires_grad);
}

void TensorPayload::expose_one(std::size_t index, bool requires_grad) {
  tensors_.push_back(with_own_version(buffers_[index]).set_requires_grad(requires_grad));
}

const at::Tensor& TensorPayload::buffer(std::size_t index, const TensorSpec& spec) {
  if (index >= buffers_.size()) buffers_.resize(index + 1);
  at::Tensor& buffer = buffers_[index];
  // The last microbatch's tensor, a view of it or a graph may still be held somewhere: then the memory is theirs.
  // Of several streams the allocator knows which one may use it next.
  const bool ours = !fenced_ && buffer.defined() && buffer.storage().use_count() == 1;
  if (ours && buffer.scalar_type() == spec.dtype && buffer.sizes() == spec.sizes && buffer.strides() == spec.strides) {
    return buffer;
  }
  // In a step under inference mode it would become an inference tensor, which a training step cannot use.
  const c10::InferenceMode normal(false);
  idle_ = false;
  buffer = at::empty_strided(spec.sizes, spec.strides, at::TensorOptions().dtype(spec.dtype).device(device_));
  return buffer;
}

}  // namespace fastpipe
