// Memory of the device: the host's, in files without a name that another process can open, too. It is never given back
// to the system before the device is done with it; what was not written yet is full of NaN.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "streams.h"

namespace {

using host_cuda::failed;
using host_cuda::put;
using host_cuda::refuse_beside_capture;

constexpr std::size_t kTotal = std::size_t{8} << 30;
constexpr std::size_t kPage = 4096;
constexpr std::size_t kGranularity = std::size_t{2} << 20;  // addresses that torch's allocator expects

struct Allocation {
  int device;
  std::size_t size;
  int file;
};

struct Opened {
  int device;
  std::size_t size;
  int uses;
  std::string ticket;
};

struct Memory {
  std::mutex mutex;
  std::map<std::byte*, Allocation> own;
  std::map<std::byte*, Opened> opened;
  std::map<std::byte*, std::size_t> host;  // that is registered, or was allocated here
  std::size_t used = 0;
};

Memory& memory() {
  static Memory* const only = new Memory;
  return *only;
}

// What is written into an IPC handle.
struct Ticket {
  pid_t process;
  int file;
  std::size_t size;
};
static_assert(sizeof(Ticket) <= sizeof(cudaIpcMemHandle_t));

std::size_t size_of(const Allocation& one) {
  return one.size;
}
std::size_t size_of(const Opened& one) {
  return one.size;
}
std::size_t size_of(std::size_t size) {
  return size;
}

// What a pointer points into.
template <typename Value>
const Value* find(const std::map<std::byte*, Value>& ranges, const void* pointer) {
  auto* address = static_cast<std::byte*>(const_cast<void*>(pointer));
  const auto after = ranges.upper_bound(address);
  if (after == ranges.begin()) return nullptr;
  const auto& [begin, value] = *std::prev(after);
  return address < begin + size_of(value) ? &value : nullptr;
}

// -1 for memory that is on none.
int device_of(const void* pointer) {
  const std::lock_guard<std::mutex> lock(memory().mutex);
  const Allocation* own = find(memory().own, pointer);
  if (own != nullptr) return own->device;
  const Opened* opened = find(memory().opened, pointer);
  return opened != nullptr ? opened->device : -1;
}

bool on_device(const void* pointer) {
  return device_of(pointer) >= 0;
}

bool pinned(const void* pointer) {
  const std::lock_guard<std::mutex> lock(memory().mutex);
  return find(memory().host, pointer) != nullptr;
}

// At addresses that are multiples of kGranularity, as torch's allocator cuts its segments.
std::byte* map_aligned(std::size_t size, int file) {
  void* const room = mmap(nullptr, size + kGranularity, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) return nullptr;
  const auto begin = (reinterpret_cast<std::uintptr_t>(room) + kGranularity - 1) / kGranularity * kGranularity;
  void* const data =
      mmap(reinterpret_cast<void*>(begin), size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
  return data == MAP_FAILED ? nullptr : static_cast<std::byte*>(data);
}

// Beside this library lies that of operators, which needs torch.
void load_operators() {
  static const bool loaded = [] {
    Dl_info own;
    dladdr(reinterpret_cast<void*>(&on_device), &own);
    const std::string folder = std::string(own.dli_fname).substr(0, std::string(own.dli_fname).rfind('/'));
    if (dlopen((folder + "/operators.so").c_str(), RTLD_NOW) != nullptr) return true;
    std::fprintf(stderr, "%s\n", dlerror());
    std::abort();
  }();
  static_cast<void>(loaded);
}

}  // namespace

extern "C" {

// By the first of which torch is there.
cudaError_t cudaMalloc(void** made, size_t size) {
  load_operators();
  if (const cudaError_t code = refuse_beside_capture()) return code;
  *made = nullptr;
  if (size == 0) return cudaSuccess;
  const std::size_t whole = (size + kPage - 1) / kPage * kPage;
  const std::lock_guard<std::mutex> lock(memory().mutex);
  if (memory().used + whole > kTotal) return failed(cudaErrorMemoryAllocation);
  const int file = memfd_create("host-cuda", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(whole)) != 0) return failed(cudaErrorMemoryAllocation);
  std::byte* const data = map_aligned(whole, file);
  if (data == nullptr) return failed(cudaErrorMemoryAllocation);
  std::memset(data, 0xff, whole);
  memory().own[data] = {host_cuda::current_device(), whole, file};
  memory().used += whole;
  *made = data;
  return cudaSuccess;
}

// Waits for the device, as it does on one.
cudaError_t cudaFree(void* pointer) {
  if (const cudaError_t code = refuse_beside_capture()) return code;
  if (pointer == nullptr) return cudaSuccess;
  host_cuda::wait_for_device();
  const std::lock_guard<std::mutex> lock(memory().mutex);
  const auto found = memory().own.find(static_cast<std::byte*>(pointer));
  if (found == memory().own.end()) return failed(cudaErrorInvalidValue);
  munmap(pointer, found->second.size);
  close(found->second.file);
  memory().used -= found->second.size;
  memory().own.erase(found);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const std::lock_guard<std::mutex> lock(memory().mutex);
  *free = kTotal - memory().used;
  *total = kTotal;
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** made, size_t size, unsigned int) {
  if (const cudaError_t code = refuse_beside_capture()) return code;
  void* const data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return failed(cudaErrorMemoryAllocation);
  const std::lock_guard<std::mutex> lock(memory().mutex);
  memory().host[static_cast<std::byte*>(data)] = size;
  *made = data;
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* pointer) {
  host_cuda::wait_for_device();
  const std::lock_guard<std::mutex> lock(memory().mutex);
  const auto found = memory().host.find(static_cast<std::byte*>(pointer));
  if (found == memory().host.end()) return failed(cudaErrorInvalidValue);
  munmap(pointer, found->second);
  memory().host.erase(found);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned int) {
  if (const cudaError_t code = refuse_beside_capture()) return code;
  const std::lock_guard<std::mutex> lock(memory().mutex);
  const bool fresh = memory().host.emplace(static_cast<std::byte*>(pointer), size).second;
  return fresh ? cudaSuccess : failed(cudaErrorHostMemoryAlreadyRegistered);
}

cudaError_t cudaHostUnregister(void* pointer) {
  host_cuda::wait_for_device();
  const std::lock_guard<std::mutex> lock(memory().mutex);
  const bool found = memory().host.erase(static_cast<std::byte*>(pointer)) != 0;
  return found ? cudaSuccess : failed(cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned int) {
  *device = host;
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  *attributes = {};
  attributes->device = std::max(0, device_of(pointer));
  attributes->hostPointer = const_cast<void*>(pointer);
  if (on_device(pointer)) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->hostPointer = nullptr;
    attributes->devicePointer = const_cast<void*>(pointer);
  } else if (pinned(pointer)) {
    attributes->type = cudaMemoryTypeHost;
    attributes->devicePointer = const_cast<void*>(pointer);
  } else {
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = -1;
  }
  return cudaSuccess;
}

// Copies. One from memory that is not pinned has read it when the call returns; one to such memory is done by then.

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
  if (size == 0) return cudaSuccess;
  if (!on_device(from) && !pinned(from)) {
    const auto* bytes = static_cast<const std::byte*>(from);
    return put(stream,
               [to, kept = std::vector<std::byte>(bytes, bytes + size)] { std::memcpy(to, kept.data(), kept.size()); });
  }
  const cudaError_t code = put(stream, [to, from, size] { std::memmove(to, from, size); });
  if (code != cudaSuccess || on_device(to) || pinned(to)) return code;
  return cudaStreamSynchronize(stream);
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind kind) {
  if (const cudaError_t code = refuse_beside_capture()) return code;
  if (const cudaError_t code = cudaMemcpyAsync(to, from, size, kind, nullptr)) return code;
  return cudaStreamSynchronize(nullptr);
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice, stream);
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t stream) {
  return put(stream, [to, value, size] { std::memset(to, value, size); });
}

cudaError_t cudaMemset(void* to, int value, size_t size) {
  return cudaMemsetAsync(to, value, size, nullptr);
}

// Memory of other processes.

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* pointer) {
  const std::lock_guard<std::mutex> lock(memory().mutex);
  const auto found = memory().own.find(static_cast<std::byte*>(pointer));
  if (found == memory().own.end()) return failed(cudaErrorInvalidValue);
  const Ticket ticket{getpid(), found->second.file, found->second.size};
  *handle = {};
  std::memcpy(handle, &ticket, sizeof(ticket));
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void** made, cudaIpcMemHandle_t handle, unsigned int flags) {
  if (flags != cudaIpcMemLazyEnablePeerAccess) return failed(cudaErrorInvalidValue);
  Ticket ticket{};
  std::memcpy(&ticket, &handle, sizeof(ticket));
  if (ticket.process == getpid()) return failed(cudaErrorDeviceUninitialized);  // as CUDA answers to its own
  const std::string path = "/proc/" + std::to_string(ticket.process) + "/fd/" + std::to_string(ticket.file);
  const std::lock_guard<std::mutex> lock(memory().mutex);
  for (auto& [address, opened] : memory().opened) {
    if (opened.ticket != path) continue;
    ++opened.uses;
    *made = address;
    return cudaSuccess;
  }
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return failed(cudaErrorMapBufferObjectFailed);
  std::byte* const data = map_aligned(ticket.size, file);
  close(file);
  if (data == nullptr) return failed(cudaErrorMapBufferObjectFailed);
  memory().opened[data] = {host_cuda::current_device(), ticket.size, 1, path};
  *made = data;
  return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void* pointer) {
  host_cuda::wait_for_device();
  const std::lock_guard<std::mutex> lock(memory().mutex);
  const auto found = memory().opened.find(static_cast<std::byte*>(pointer));
  if (found == memory().opened.end()) return failed(cudaErrorInvalidValue);
  if (--found->second.uses == 0) {
    munmap(pointer, found->second.size);
    memory().opened.erase(found);
  }
  return cudaSuccess;
}

}  // extern "C"
