// What the device says of itself, and kernels, of which it has but one.
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <thread>
#include <vector>

#include "streams.h"

namespace {

using host_cuda::failed;

constexpr int kVersion = 13000;
constexpr double kCyclesPerSecond = 1.5e9;

struct Kernel {
  const void* function;
  const char* name;
};

std::vector<Kernel>& kernels() {
  static auto* const all = new std::vector<Kernel>;
  return *all;
}

const char* name_of(const void* function) {
  for (const Kernel& kernel : kernels()) {
    if (kernel.function == function) return kernel.name;
  }
  return "of no name";
}

thread_local cudaStream_t launched_in = nullptr;

// Nothing is computed in silence: what would be is done by the host's kernels instead (operators.cpp), or is an error.
// The one that does nothing, for some cycles, is here (torch.cuda._sleep).
cudaError_t launch(const void* function, void** arguments, cudaStream_t stream) {
  const char* const name = name_of(function);
  if (std::strstr(name, "spin_kernel") != nullptr) {
    const std::chrono::duration<double> time(*static_cast<std::int64_t*>(arguments[0]) / kCyclesPerSecond);
    return host_cuda::launch(stream, [time] { std::this_thread::sleep_for(time); });
  }
  std::fprintf(stderr, "CUDA on the host has no kernels, and was asked for %s\n", name);
  return failed(cudaErrorNotSupported);
}

}  // namespace

extern "C" {

cudaError_t cudaDriverGetVersion(int* version) {
  *version = kVersion;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  return cudaDriverGetVersion(version);
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  std::strcpy(properties->name, "CUDA on the host");
  properties->totalGlobalMem = std::size_t{8} << 30;
  properties->major = 9;
  properties->multiProcessorCount = 132;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 0x7fffffff;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->sharedMemPerBlock = 48 << 10;
  properties->sharedMemPerBlockOptin = 227 << 10;
  properties->sharedMemPerMultiprocessor = 228 << 10;
  properties->regsPerMultiprocessor = 65536;
  properties->l2CacheSize = 50 << 20;
  properties->unifiedAddressing = 1;
  properties->canUseHostPointerForRegisteredMem = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  static const std::map<cudaDeviceAttr, int> known{{cudaDevAttrUnifiedAddressing, 1},
                                                   {cudaDevAttrCanUseHostPointerForRegisteredMem, 1},
                                                   {cudaDevAttrCanFlushRemoteWrites, 1},
                                                   {cudaDevAttrMultiProcessorCount, 132},
                                                   {cudaDevAttrComputeCapabilityMajor, 9}};
  const auto found = known.find(which);
  *value = found == known.end() ? 0 : found->second;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int index) {
  std::snprintf(text, static_cast<std::size_t>(size), "0000:%02x:00.0", index);
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device != peer;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned int) {
  return cudaSuccess;
}

cudaError_t cudaProfilerStart() {
  return cudaSuccess;
}
cudaError_t cudaProfilerStop() {
  return cudaSuccess;
}

// Kernels.

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) {
  return 0;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  kernels().push_back({function, name});
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
unsigned int __cudaPushCallConfiguration(dim3, dim3, size_t, CUstream_st* stream) {
  launched_in = stream;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = *block = dim3{1, 1, 1};
  *shared = 0;
  *static_cast<cudaStream_t*>(stream) = launched_in;
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  return launch(kernel, arguments, stream);
}
cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  return launch(function, arguments, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
  return launch(function, arguments, config->stream);
}

}  // extern "C"
