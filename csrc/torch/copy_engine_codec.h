// Tensors in the places of copy engines: as in shared memory, one after the other, each aligned to 64 bytes.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "core/copy_engine_codec.h"
#include "payload.h"

namespace fastpipe {

class DeviceCodec final : public CopyCodec {
 public:
  explicit DeviceCodec(at::Device device) : device_(device) {}

  std::size_t size(const Spec& spec) const override;
  void list(const Payload& payload, std::vector<CopyPart>& parts) const override;
  std::shared_ptr<const void> duplicate(std::vector<CopyPart>& parts) const override;
  // The tensors lie in the place itself.
  void adopt(Payload& into, const Spec& spec, CopyLoan loan) const override;

 private:
  at::Device device_;
};

}  // namespace fastpipe
