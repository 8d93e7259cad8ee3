#include "nvtx_ranges.h"

#include <nvtx3/nvToolsExt.h>

namespace fastpipe {

void NvtxRanges::push(const char* name) noexcept {
  nvtxRangePushA(name);
}

void NvtxRanges::pop() noexcept {
  nvtxRangePop();
}

}  // namespace fastpipe
