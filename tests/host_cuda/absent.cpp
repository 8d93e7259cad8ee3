// The library that all this becomes passes for libcuda.so.1. What torch links of that one is here, and does nothing.
// (No header is included: these have other signatures there.)
namespace {

constexpr int kNotSupported = 801;

}  // namespace

#define ABSENT(name)      \
  extern "C" int name() { \
    return kNotSupported; \
  }

ABSENT(cuCtxSetCurrent)
ABSENT(cuDeviceGet)
ABSENT(cuDeviceGetAttribute)
ABSENT(cuDevicePrimaryCtxRetain)
ABSENT(cuFuncGetAttribute)
ABSENT(cuFuncSetAttribute)
ABSENT(cuFuncSetCacheConfig)
ABSENT(cuLaunchCooperativeKernel)
ABSENT(cuLaunchKernel)
ABSENT(cuLinkAddData_v2)
ABSENT(cuLinkComplete)
ABSENT(cuLinkCreate_v2)
ABSENT(cuModuleGetFunction)
ABSENT(cuModuleLoad)
ABSENT(cuModuleLoadData)
ABSENT(cuModuleLoadDataEx)
ABSENT(cuModuleUnload)
ABSENT(cuOccupancyMaxActiveBlocksPerMultiprocessor)
ABSENT(cuPointerGetAttribute)
ABSENT(cuTensorMapEncodeTiled)
