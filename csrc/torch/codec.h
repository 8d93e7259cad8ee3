// Tensors in memory that two processes share: one after the other, strides kept; in cells of the host's memory each
// aligned to 64 bytes, in places of a device's to 512.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "core/shared_ring.h"
#include "payload.h"

namespace fastpipe {

class TensorCodec final : public Codec {
 public:
  // device: where the tensors are. Between the host and another device they are copied, and the host waits.
  explicit TensorCodec(at::Device device = at::Device(at::kCPU)) : device_(device) {}

  std::size_t size(const Payload& payload, bool announced) const override;
  void write(const Payload& payload, const CellBytes& to) const override;
  std::unique_ptr<Spec> read_spec(const CellBytes& from) const override;
  // On a CPU the tensors lie in the cell itself: it is theirs, to change as well, until the last of them and of what
  // shares their storage is gone.
  void adopt(Payload& into, const Spec& spec, const CellBytes& from, SharedMemoryLease lease) const override;

  std::size_t size(const Spec& spec) const override;
  void list(const Payload& payload, std::vector<CopyPart>& parts) const override;
  std::shared_ptr<const void> duplicate(std::vector<CopyPart>& parts) const override;
  // The tensors lie in the place itself.
  void adopt(Payload& into, const Spec& spec, CopyLoan loan) const override;

 private:
  void write_one(const at::Tensor& tensor, std::byte* to) const;

  at::Device device_;
};

}  // namespace fastpipe
