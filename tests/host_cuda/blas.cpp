// cuBLAS, as far as torch asks it for what the host's kernels do not have: a product of 16-bit matrices that is added
// to one of 32 bits.
#include <cublas_v2.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "numbers.h"
#include "streams.h"

namespace {

struct Handle {
  cudaStream_t stream = nullptr;
  cublasMath_t math = CUBLAS_DEFAULT_MATH;
  cublasPointerMode_t pointers = CUBLAS_POINTER_MODE_HOST;
};

Handle& handle_of(cublasHandle_t handle) {
  return *reinterpret_cast<Handle*>(handle);
}

float number(const void* data, cudaDataType_t type, std::int64_t index) {
  if (type == CUDA_R_16BF) return static_cast<const host_cuda::Bfloat16*>(data)[index];
  if (type == CUDA_R_32F) return static_cast<const float*>(data)[index];
  std::fprintf(stderr, "cuBLAS on the host multiplies no numbers of type %d\n", type);
  std::abort();
}

}  // namespace

extern "C" {

cublasStatus_t cublasCreate_v2(cublasHandle_t* made) {
  *made = reinterpret_cast<cublasHandle_t>(new Handle);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
  delete &handle_of(handle);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
  handle_of(handle).stream = stream;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t, void*, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
  handle_of(handle).math = mode;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t* mode) {
  *mode = handle_of(handle).math;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode) {
  handle_of(handle).pointers = mode;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t* mode) {
  *mode = handle_of(handle).pointers;
  return CUBLAS_STATUS_SUCCESS;
}

// Columns are what is contiguous.
cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k,
                            const void* alpha, const void* a, cudaDataType_t type_a, int lda, const void* b,
                            cudaDataType_t type_b, int ldb, const void* beta, void* c, cudaDataType_t type_c, int ldc,
                            cublasComputeType_t compute, cublasGemmAlgo_t) {
  if (type_c != CUDA_R_32F || compute != CUBLAS_COMPUTE_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (handle_of(handle).pointers != CUBLAS_POINTER_MODE_HOST) return CUBLAS_STATUS_NOT_SUPPORTED;
  const float times = *static_cast<const float*>(alpha), keep = *static_cast<const float*>(beta);
  const cudaError_t code = host_cuda::put(handle_of(handle).stream, [=] {
    for (std::int64_t column = 0; column < n; ++column) {
      for (std::int64_t row = 0; row < m; ++row) {
        float total = 0;
        for (std::int64_t i = 0; i < k; ++i) {
          const float left = number(a, type_a, op_a == CUBLAS_OP_N ? row + i * lda : i + row * lda);
          total += left * number(b, type_b, op_b == CUBLAS_OP_N ? i + column * ldb : column + i * ldb);
        }
        float& into = static_cast<float*>(c)[row + column * ldc];
        into = times * total + (keep == 0 ? 0 : keep * into);
      }
    }
  });
  return code == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

}  // extern "C"
