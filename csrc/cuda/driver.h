// CUDA's runtime and driver as fastpipe calls them: errors in words, and what only the driver has.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>
#include <string>

namespace fastpipe {

// Throws Error, naming what was tried, unless `code` is success.
void require(cudaError_t code, const char* what);

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

// Why a device cannot be one end of the copy-engine transport; nothing if it can.
std::optional<std::string> copy_engine_obstacle(int device);

}  // namespace fastpipe
