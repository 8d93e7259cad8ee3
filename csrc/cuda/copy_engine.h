// The copy engine of a CUDA device. Written for GPUs, and not yet run on one.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "core/copy_engine.h"

namespace fastpipe {

// Flags in memory that streams write and wait for, without the host. The functions are looked up in the driver
// that runs, so that this library can be loaded where there is none.
class StreamFlags {
 public:
  // Throws Error where the driver lacks them.
  StreamFlags();

  // When all that `stream` has before is done and can be seen.
  void write(cudaStream_t stream, std::uint32_t* flag, std::uint32_t value) const;
  // What `stream` gets next waits until the flag is `value` or, on the circle of 32 bits, beyond it.
  void wait(cudaStream_t stream, std::uint32_t* flag, std::uint32_t value) const;

 private:
  using Function = CUresult(CUDAAPI*)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);
  static Function find(const char* name);

  Function write_;
  Function wait_;
};

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
