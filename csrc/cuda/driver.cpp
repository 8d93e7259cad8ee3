#include "driver.h"

#include "core/errors.h"

namespace fastpipe {

namespace {

constexpr unsigned int kStreamFlagsSince = 11070;  // in this form

void require_driver(CUresult code, const char* what) {
  if (code != CUDA_SUCCESS) throw Error(std::string(what) + " failed (CUresult " + std::to_string(code) + ")");
}

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  require(cudaDeviceGetAttribute(&value, which, device), "asking a device what it can do");
  return value;
}

}  // namespace

void require(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // it is reported now, and not by the next call
  throw Error(std::string(what) + " failed (" + cudaGetErrorName(code) + ": " + cudaGetErrorString(code) + ")");
}

StreamFlags::StreamFlags() : write_(find("cuStreamWriteValue32")), wait_(find("cuStreamWaitValue32")) {}

StreamFlags::Function StreamFlags::find(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  require(cudaGetDriverEntryPointByVersion(name, &function, kStreamFlagsSince, cudaEnableDefault, &found), name);
  if (found != cudaDriverEntryPointSuccess || function == nullptr) {
    throw Error(std::string("the CUDA driver has no ") + name + "; install a newer one");
  }
  return reinterpret_cast<Function>(function);
}

void StreamFlags::write(cudaStream_t stream, std::uint32_t* flag, std::uint32_t value) const {
  const auto address = reinterpret_cast<CUdeviceptr>(flag);
  require_driver(write_(stream, address, value, CU_STREAM_WRITE_VALUE_DEFAULT), "cuStreamWriteValue32");
}

void StreamFlags::wait(cudaStream_t stream, std::uint32_t* flag, std::uint32_t value) const {
  const auto address = reinterpret_cast<CUdeviceptr>(flag);
  require_driver(wait_(stream, address, value, CU_STREAM_WAIT_VALUE_GEQ), "cuStreamWaitValue32");
}

std::optional<std::string> copy_engine_obstacle(int device) {
  try {
    if (attribute(cudaDevAttrUnifiedAddressing, device) == 0) return "the device has no unified addressing";
    if (attribute(cudaDevAttrCanUseHostPointerForRegisteredMem, device) == 0) {
      return "the device does not see the host's memory at the host's addresses";
    }
    const StreamFlags flags;
    return std::nullopt;
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace fastpipe
