#include "copy_engine_codec.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>

#include <utility>

#include "bytes.h"
#include "core/copy_engine_layout.h"

namespace fastpipe {

namespace {

at::Tensor tensor_in(const CopyLoan& loan, std::size_t offset, const TensorSpec& spec, at::Device device) {
  at::Tensor tensor = at::for_blob(loan.data() + offset, spec.sizes)
                          .strides(spec.strides)
                          .deleter([memory = loan.memory()](void*) {})
                          .options(at::TensorOptions().dtype(spec.dtype).device(device))
                          .target_device(device)
                          .make_tensor();
  if (spec.requires_grad) tensor.set_requires_grad(true);
  return tensor;
}

}  // namespace

std::size_t DeviceCodec::size(const Spec& spec) const {
  std::size_t bytes = 0;
  for (const TensorSpec& tensor : specs_in(spec)) {
    bytes += whole_blocks(bytes_of(tensor));
  }
  return bytes;
}

void DeviceCodec::list(const Payload& payload, std::vector<CopyPart>& parts) const {
  for (const at::Tensor& tensor : static_cast<const TensorPayload&>(payload).tensors()) {
    const std::size_t bytes = tensor.nbytes();
    parts.push_back({bytes == 0 ? nullptr : static_cast<const std::byte*>(tensor.const_data_ptr()), bytes});
  }
}

std::shared_ptr<const void> DeviceCodec::duplicate(std::vector<CopyPart>& parts) const {
  const at::AutoDispatchBelowADInplaceOrView guard;
  auto copies = std::make_shared<std::vector<at::Tensor>>();
  for (CopyPart& part : parts) {
    if (part.bytes == 0) continue;
    copies->push_back(bytes_at(part.data, part.bytes, device_).clone());
    part.data = static_cast<const std::byte*>(copies->back().const_data_ptr());
  }
  return copies;
}

void DeviceCodec::adopt(Payload& into, const Spec& spec, CopyLoan loan) const {
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
