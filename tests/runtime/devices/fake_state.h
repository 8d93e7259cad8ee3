// What the parts of the fake device share: its account, each thread's stream, the tape of a recording.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstddef>

#include "account.h"
#include "tape.h"

namespace fake_device {

inline constexpr auto kFake = c10::DeviceType::PrivateUse1;
inline const c10::Device kDevice(kFake, 0);

inline Account& account() {
  static Account* const only = new Account;  // never destroyed: tensors may outlive it
  return *only;
}

inline thread_local std::size_t current_stream = 0;

// Where what is done is noted while it is recorded; null otherwise.
inline std::atomic<Tape*> tape{nullptr};

inline c10::Stream to_stream(std::size_t number) {
  return c10::Stream(c10::Stream::UNSAFE, kDevice, static_cast<c10::StreamId>(number));
}

inline std::size_t number_of(const c10::Stream& stream) {
  return static_cast<std::size_t>(stream.id());
}

// The same memory as a tensor of the host's.
inline at::Tensor host_view(const at::Tensor& tensor) {
  return at::for_blob(tensor.data_ptr(), tensor.sizes())
      .strides(tensor.strides())
      .options(at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU))
      .make_tensor();
}

}  // namespace fake_device
