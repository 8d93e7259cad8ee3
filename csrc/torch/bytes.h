// Memory as a tensor of bytes, so that torch copies it whatever device it is on.
#pragma once

#include <ATen/ops/from_blob.h>
#include <c10/core/Device.h>

#include <cstddef>

namespace fastpipe {

// The memory must outlive the tensor. `data` may not be null unless there are no bytes.
inline at::Tensor bytes_at(const void* data, std::size_t bytes, at::Device device) {
  return at::for_blob(const_cast<void*>(data), {static_cast<std::int64_t>(bytes)})
      .options(at::TensorOptions().dtype(at::kByte).device(device))
      .target_device(device)
      .make_tensor();
}

}  // namespace fastpipe
