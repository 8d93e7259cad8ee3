// What a profiler does to see NVTX ranges: named in NVTX_INJECTION64_PATH, it is loaded by the first range, and prints
// every one with a mark for the thread it is of.
#include <nvtx3/nvToolsExt.h>

#include <cstdio>
#include <functional>
#include <thread>

namespace {

int push(const char* name) {
  std::fprintf(stderr, "push %zu %s\n", std::hash<std::thread::id>()(std::this_thread::get_id()), name);
  return 0;
}

int pop() {
  std::fprintf(stderr, "pop %zu\n", std::hash<std::thread::id>()(std::this_thread::get_id()));
  return 0;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table) {
  const auto* const callbacks = static_cast<const NvtxExportTableCallbacks*>(get_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned int size = 0;
  if (callbacks == nullptr || callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &table, &size) == 0) return 0;
  *table[NVTX_CBID_CORE_RangePushA] = reinterpret_cast<NvtxFunctionPointer>(&push);
  *table[NVTX_CBID_CORE_RangePop] = reinterpret_cast<NvtxFunctionPointer>(&pop);
  return 1;
}
