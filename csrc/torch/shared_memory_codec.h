// Tensors in shared memory: one after the other, each aligned to 64 bytes, strides kept.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "core/shared_memory_codec.h"
#include "payload.h"

namespace fastpipe {

class TensorCodec final : public SharedMemoryCodec {
 public:
  // device: where the tensors are. Between the host and another device they are copied, and the host waits.
  explicit TensorCodec(at::Device device = at::Device(at::kCPU)) : device_(device) {}

  std::size_t size(const Payload& payload, bool announced) const override;
  void write(const Payload& payload, const CellBytes& to) const override;
  std::unique_ptr<Spec> read_spec(const CellBytes& from) const override;
  // On a CPU the tensors lie in the cell itself: it is theirs, to change as well, until the last of them and of what
  // shares their storage is gone.
  void adopt(Payload& into, const Spec& spec, const CellBytes& from, SharedMemoryLease lease) const override;

 private:
  void write_one(const at::Tensor& tensor, std::byte* to) const;

  at::Device device_;
};

}  // namespace fastpipe
