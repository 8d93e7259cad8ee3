// The copy engine of a CUDA device. Written for GPUs, and not yet run on one.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <optional>
#include <string>

#include "core/copy_engine.h"
#include "driver.h"

namespace fastpipe {

class CudaCopyEngine final : public CopyEngine {
 public:
  // Throws Error where the device or its driver cannot do what is asked of it.
  explicit CudaCopyEngine(int device);
  ~CudaCopyEngine() override;

  // By cudaMalloc, not from torch's allocator: an IPC handle is that of a whole allocation.
  std::shared_ptr<CopyMemory> allocate(std::size_t bytes) override;
  CopyTicket ticket(const CopyMemory& memory) override;
  std::shared_ptr<CopyMemory> open(const CopyTicket& ticket) override;
  std::shared_ptr<void> expose(std::shared_ptr<SharedMemorySegment> segment) override;
  std::unique_ptr<CopyQueue> make_queue() override;
  std::unique_ptr<CopyMark> make_mark() override;
  // torch's current stream.
  CopyQueue& current() override;

 private:
  class Stream;

  int device_;
  StreamFlags flags_;
  std::unique_ptr<Stream> current_;
};

}  // namespace fastpipe
