// The few functions of a driver that are asked for.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <thread>

#include "streams.h"

namespace {

using host_cuda::put;

// Flags in memory, that hosts and streams of other processes write, too.
using Flag = std::atomic<std::uint32_t>;

CUresult result_of(cudaError_t code) {
  return code == cudaSuccess ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}

CUresult not_supported() {
  return CUDA_ERROR_NOT_SUPPORTED;
}

template <typename Function>
void* address(Function* function) {
  return reinterpret_cast<void*>(function);
}

}  // namespace

extern "C" {

CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags) {
  if (flags != CU_STREAM_WRITE_VALUE_DEFAULT) return CUDA_ERROR_NOT_SUPPORTED;
  auto* flag = reinterpret_cast<Flag*>(address);
  return result_of(put(stream, [flag, value] { flag->store(value); }));
}

CUresult cuStreamWaitValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags) {
  // as the device says that it can flush
  if (flags != (CU_STREAM_WAIT_VALUE_GEQ | CU_STREAM_WAIT_VALUE_FLUSH)) return CUDA_ERROR_NOT_SUPPORTED;
  auto* flag = reinterpret_cast<Flag*>(address);
  return result_of(put(stream, [flag, value] {
    while (static_cast<std::int32_t>(flag->load() - value) < 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }));
}

CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned int* flags, int* active) {
  if (flags != nullptr) *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = reinterpret_cast<CUcontext>(1);
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "an error of CUDA on the host";
  return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned int, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  static const std::map<std::string, void*> known{{"cuStreamWriteValue32", address(&cuStreamWriteValue32)},
                                                  {"cuStreamWaitValue32", address(&cuStreamWaitValue32)},
                                                  {"cuDevicePrimaryCtxGetState", address(&cuDevicePrimaryCtxGetState)},
                                                  {"cuCtxGetCurrent", address(&cuCtxGetCurrent)},
                                                  {"cuGetErrorString", address(&cuGetErrorString)}};
  const auto one = known.find(name);
  *function = one == known.end() ? address(&not_supported) : one->second;
  if (found != nullptr) *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

}  // extern "C"
