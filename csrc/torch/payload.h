// Tensors as the core's payload.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Device.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/copy_engine.h"
#include "core/transport.h"
#include "streams.h"

namespace fastpipe {

// Memory as a tensor of bytes, so that torch copies it whatever device it is on.

// The memory must outlive the tensor. `data` may not be null unless there are no bytes.
inline at::Tensor bytes_at(const void* data, std::size_t bytes, at::Device device) {
  return at::for_blob(const_cast<void*>(data), {static_cast<std::int64_t>(bytes)})
      .options(at::TensorOptions().dtype(at::kByte).device(device))
      .target_device(device)
      .make_tensor();
}

struct TensorSpec {
  at::ScalarType dtype;
  bool requires_grad;
  c10::SmallVector<std::int64_t, 5> sizes;
  c10::SmallVector<std::int64_t, 5> strides;

  explicit TensorSpec(const at::Tensor& tensor);
  TensorSpec(at::ScalarType dtype, bool requires_grad, c10::IntArrayRef sizes, c10::IntArrayRef strides);
  bool matches(const at::Tensor& tensor) const;
  std::string text() const;
};

std::size_t bytes_of(const TensorSpec& spec);

class TensorListSpec final : public Spec {
 public:
  explicit TensorListSpec(std::vector<TensorSpec> tensors) : tensors_(std::move(tensors)) {}
  const std::vector<TensorSpec>& tensors() const { return tensors_; }
  std::string text() const override;

 private:
  std::vector<TensorSpec> tensors_;
};

inline const std::vector<TensorSpec>& specs_in(const Spec& spec) {
  return static_cast<const TensorListSpec&>(spec).tensors();
}

// A list of detached tensors; whether the receiver's copy is to require a gradient is each one's own flag.
class TensorPayload final : public Payload {
 public:
  // fenced: it is filled, read and cleared on several streams of the device.
  explicit TensorPayload(at::Device device, bool fenced = false) : device_(device), fenced_(fenced) {}

  const std::vector<at::Tensor>& tensors() const { return tensors_; }
  void add(at::Tensor tensor) { tensors_.push_back(std::move(tensor)); }
  // The current stream has made the contents.
  void filled() {
    if (fenced_) made_.record(device_);
  }
  // The contents for the current stream, which may keep them.
  const std::vector<at::Tensor>& taken_in() const;
  // The contents lie in memory that is lent. When they are cleared, what somebody else still holds of them is moved to
  // memory of its own, on the current stream, and the loan ends.
  void borrow(CopyLoan loan);

  // On the stream that made the contents.
  void clear() noexcept override;
  void drop_memory() noexcept override {
    buffers_.clear();
    idle_ = false;
  }
  bool empty() const override { return tensors_.empty(); }
  void pack() override;
  void copy_from(const Payload& source) override;
  std::unique_ptr<Spec> spec() const override;
  bool matches(const Spec& spec) const override;
  // No fence is waited for in a later step, which may be recorded: a recording cannot wait for what was before it.
  void end_step() noexcept override { free_.forget(); }

  // To be received into: memory of that look, which nobody else can see, ...
  const std::vector<at::Tensor>& prepare(const std::vector<TensorSpec>& specs);
  // ... on another stream than that which has called prepare() only after what used it before, ...
  void wait_until_free() const { free_.wait(); }
  // ... and, once it is filled, what the stage sees.
  void expose(const std::vector<TensorSpec>& specs);

 private:
  const at::Tensor& buffer(std::size_t index, const TensorSpec& spec);
  void note_idle();
  void end_loan();
  void expose_one(std::size_t index, bool requires_grad);

  at::Device device_;
  bool fenced_;
  bool idle_ = false;  // no buffer was in use any more when the contents were cleared
  Fence free_;         // of the buffers
  Fence made_;
  mutable Fence read_;  // by another stream
  std::vector<at::Tensor> tensors_;
  std::vector<at::Tensor> buffers_;  // kept from step to step
  CopyLoan loan_;
  std::vector<c10::Storage> lent_;  // those of the contents
};

}  // namespace fastpipe
