// The copy engine of a CUDA device. Written for GPUs, and not yet run on one.
#include "core/copy_engine.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "core/common.h"

namespace fastpipe {

namespace {

constexpr unsigned int kStreamFlagsSince = 11070;  // in this form

void require_driver(CUresult code, const char* what) {
  if (code != CUDA_SUCCESS) throw Error(std::string(what) + " failed (CUresult " + std::to_string(code) + ")");
}

void require(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // it is reported now, and not by the next call
  throw Error(std::string(what) + " failed (" + cudaGetErrorName(code) + ": " + cudaGetErrorString(code) + ")");
}

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  require(cudaDeviceGetAttribute(&value, which, device), "asking a device what it can do");
  return value;
}

// Of a device, whichever is the calling thread's. Where it fails the device is lost, or the process is a forked child
// or ends: there is nothing to report to.
template <typename Body>
void release_on(int device, const Body& body) noexcept {
  try {
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
    body();
  } catch (const std::exception&) {
  }
  static_cast<void>(cudaGetLastError());
}

// Smaller allocations may lie beside others in one block, which an IPC handle would open as a whole.
constexpr std::size_t kGranularity = std::size_t{2} << 20;

static_assert(sizeof(cudaIpcMemHandle_t) <= sizeof(CopyTicket), "a ticket has room for a handle");

class OwnMemory final : public CopyMemory {
 public:
  OwnMemory(int device, std::size_t bytes)
      : device_(device), size_((bytes + kGranularity - 1) / kGranularity * kGranularity) {
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device_));
    cudaError_t code = cudaMalloc(&data_, size_);
    if (code == cudaErrorMemoryAllocation) {
      // torch keeps what was freed in the step that announced
      static_cast<void>(cudaGetLastError());
      c10::cuda::CUDACachingAllocator::emptyCache();
      code = cudaMalloc(&data_, size_);
    }
    require(code, "allocating memory that other processes can open");
  }
  ~OwnMemory() override {
    release_on(device_, [this] { cudaFree(data_); });
  }
  std::byte* data() const override { return static_cast<std::byte*>(data_); }
  std::size_t size() const override { return size_; }

 private:
  int device_;
  std::size_t size_;
  void* data_ = nullptr;
};

class OpenedMemory final : public CopyMemory {
 public:
  OpenedMemory(int device, const cudaIpcMemHandle_t& handle) : device_(device) {
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device_));
    require(cudaIpcOpenMemHandle(&data_, handle, cudaIpcMemLazyEnablePeerAccess), "opening another process's memory");
  }
  ~OpenedMemory() override {
    release_on(device_, [this] { cudaIpcCloseMemHandle(data_); });
  }
  std::byte* data() const override { return static_cast<std::byte*>(data_); }
  std::size_t size() const override { return 0; }  // its owner knows

 private:
  int device_;
  void* data_ = nullptr;
};

// Host memory as the device sees it, at the same addresses.
class Registered final {
 public:
  Registered(int device, std::shared_ptr<SharedMemorySegment> segment) : device_(device), segment_(std::move(segment)) {
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device_));
    require(cudaHostRegister(segment_->data(), segment_->size(), cudaHostRegisterPortable | cudaHostRegisterMapped),
            "showing the host's memory to the device");
  }
  Registered(const Registered&) = delete;
  Registered& operator=(const Registered&) = delete;
  ~Registered() {
    release_on(device_, [this] { cudaHostUnregister(segment_->data()); });
  }

 private:
  int device_;
  std::shared_ptr<SharedMemorySegment> segment_;
};

class CudaMark final : public CopyMark {
 public:
  explicit CudaMark(int device) : device_(device) {
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device_));
    require(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "making an event");
  }
  ~CudaMark() override {
    release_on(device_, [this] { cudaEventDestroy(event_); });
  }
  bool reached() const override {
    const cudaError_t state = cudaEventQuery(event_);
    if (state == cudaErrorNotReady) {
      static_cast<void>(cudaGetLastError());
      return false;
    }
    require(state, "asking for an event");
    return true;
  }
  cudaEvent_t event() const { return event_; }

 private:
  int device_;
  cudaEvent_t event_ = nullptr;
};

// Flags in memory that streams write and wait for, without the host. The functions are looked up in the driver
// that runs, so that this library can be loaded where there is none.
class StreamFlags {
 public:
  // Throws Error where the driver lacks them.
  explicit StreamFlags(int device);

  // When all that `stream` has before is done and can be seen.
  void write(cudaStream_t stream, std::uint32_t* flag, std::uint32_t value) const;
  // What `stream` gets next waits until the flag is `value` or, on the circle of 32 bits, beyond it; then it sees what
  // other devices had written to this one before the flag.
  void wait(cudaStream_t stream, std::uint32_t* flag, std::uint32_t value) const;

 private:
  using Function = CUresult(CUDAAPI*)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);
  static Function find(const char* name);

  Function write_;
  Function wait_;
  unsigned int wait_flags_ = CU_STREAM_WAIT_VALUE_GEQ;
};

StreamFlags::StreamFlags(int device) : write_(find("cuStreamWriteValue32")), wait_(find("cuStreamWaitValue32")) {
  // A device that can flush remote writes may show them in another order than that in which they came.
  if (attribute(cudaDevAttrCanFlushRemoteWrites, device) != 0) wait_flags_ |= CU_STREAM_WAIT_VALUE_FLUSH;
}

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
  require_driver(wait_(stream, address, value, wait_flags_), "cuStreamWaitValue32");
}

// A stream that is somebody else's.
class CudaStream : public CopyQueue {
 public:
  CudaStream(int device, const StreamFlags& flags, cudaStream_t stream)
      : device_(device), flags_(flags), stream_(stream) {}

  void copy(std::byte* to, const std::byte* from, std::size_t bytes) override {
    const c10::cuda::CUDAGuard guard(index());
    require(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_), "starting a copy");
  }
  void zero(std::byte* to, std::size_t bytes) override {
    const c10::cuda::CUDAGuard guard(index());
    require(cudaMemsetAsync(to, 0, bytes, stream_), "filling a place");
  }
  void write(SharedWord& flag, std::uint32_t value) override {
    const c10::cuda::CUDAGuard guard(index());
    flags_.write(stream_, address(flag), value);
  }
  void wait(SharedWord& flag, std::uint32_t value) override {
    const c10::cuda::CUDAGuard guard(index());
    flags_.wait(stream_, address(flag), value);
  }
  void record(CopyMark& mark) override {
    const c10::cuda::CUDAGuard guard(index());
    require(cudaEventRecord(static_cast<CudaMark&>(mark).event(), stream_), "recording an event");
  }
  void wait(const CopyMark& mark) override {
    const c10::cuda::CUDAGuard guard(index());
    require(cudaStreamWaitEvent(stream_, static_cast<const CudaMark&>(mark).event(), 0), "waiting for an event");
  }

  void follow(cudaStream_t stream) { stream_ = stream; }

 protected:
  int device() const { return device_; }
  cudaStream_t stream() const { return stream_; }

 private:
  c10::DeviceIndex index() const { return static_cast<c10::DeviceIndex>(device_); }
  static std::uint32_t* address(SharedWord& flag) { return reinterpret_cast<std::uint32_t*>(&flag); }

  int device_;
  const StreamFlags& flags_;
  cudaStream_t stream_;
};

// Of the highest priority, as a message is little work and another process waits for it. torch's streams are of the
// lowest four (c10/cuda/CUDAStream.h), and 32 of each, as many as there are queues in hardware.
cudaStream_t make_stream(int device) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  int lowest = 0;
  int highest = 0;
  require(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "asking a device for its priorities");
  cudaStream_t stream = nullptr;
  require(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest), "making a stream");
  return stream;
}

// Its own. Work that it still has goes on when it is destroyed.
class OwnStream final : public CudaStream {
 public:
  OwnStream(int device, const StreamFlags& flags) : CudaStream(device, flags, make_stream(device)) {}
  ~OwnStream() override {
    release_on(device(), [this] { cudaStreamDestroy(stream()); });
  }
};

class CudaCopyEngine final : public CopyEngine {
 public:
  // Throws Error where the device or its driver cannot do what is asked of it.
  explicit CudaCopyEngine(int device);

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
  int device_;
  StreamFlags flags_;
  std::unique_ptr<CudaStream> current_;
};

CudaCopyEngine::CudaCopyEngine(int device) : device_(device), flags_(device) {
  if (attribute(cudaDevAttrUnifiedAddressing, device) == 0) throw Error("the device has no unified addressing");
  if (attribute(cudaDevAttrCanUseHostPointerForRegisteredMem, device) == 0) {
    throw Error("the device does not see the host's memory at the host's addresses");
  }
  current_ = std::make_unique<CudaStream>(device_, flags_, nullptr);
}

std::shared_ptr<CopyMemory> CudaCopyEngine::allocate(std::size_t bytes) {
  return std::make_shared<OwnMemory>(device_, bytes);
}

CopyTicket CudaCopyEngine::ticket(const CopyMemory& memory) {
  cudaIpcMemHandle_t handle{};
  require(cudaIpcGetMemHandle(&handle, memory.data()), "making an IPC handle");
  CopyTicket ticket{};
  std::memcpy(ticket.data(), &handle, sizeof(handle));
  return ticket;
}

std::shared_ptr<CopyMemory> CudaCopyEngine::open(const CopyTicket& ticket) {
  cudaIpcMemHandle_t handle{};
  std::memcpy(&handle, ticket.data(), sizeof(handle));
  return std::make_shared<OpenedMemory>(device_, handle);
}

std::shared_ptr<void> CudaCopyEngine::expose(std::shared_ptr<SharedMemorySegment> segment) {
  return std::make_shared<Registered>(device_, std::move(segment));
}

std::unique_ptr<CopyQueue> CudaCopyEngine::make_queue() {
  return std::make_unique<OwnStream>(device_, flags_);
}

std::unique_ptr<CopyMark> CudaCopyEngine::make_mark() {
  return std::make_unique<CudaMark>(device_);
}

CopyQueue& CudaCopyEngine::current() {
  current_->follow(c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device_)).stream());
  return *current_;
}

}  // namespace

std::shared_ptr<CopyEngine> make_cuda_copy_engine(int device) {
  return std::make_shared<CudaCopyEngine>(device);
}

}  // namespace fastpipe
