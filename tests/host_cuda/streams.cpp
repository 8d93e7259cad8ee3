#include "state.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <utility>

namespace host_cuda {

namespace {

constexpr int kHighest = -5;        // as an H100 says
constexpr std::size_t kQueues = 8;  // of a priority, if the environment does not say otherwise

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::size_t number_in_environment(const char* name, std::size_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::stoul(text) : otherwise;
}

thread_local int device_of_thread = 0;
thread_local cudaError_t last_error = cudaSuccess;

Event& event_of(cudaEvent_t event) {
  return *reinterpret_cast<Event*>(event);
}

}  // namespace

void dawdle() {
  static const bool wanted = std::getenv("HOST_CUDA_DAWDLES") != nullptr;
  if (!wanted) return;
  thread_local std::minstd_rand random(std::random_device{}());
  if (random() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
}

State::State() : default_streams(number_in_environment("HOST_CUDA_DEVICES", 1)) {
  for (std::size_t i = 0; i < default_streams.size(); ++i) {
    default_streams[i].device = static_cast<int>(i);
    default_streams[i].queue = deal(default_streams[i].device, 0);
  }
}

Queue* State::deal(int device, int priority) {
  const std::size_t limit = number_in_environment("CUDA_DEVICE_MAX_CONNECTIONS", kQueues);
  Queues& all = queues[{device, priority}];
  const std::size_t next = all.dealt++ % limit;
  if (next == all.made.size()) all.made.push_back(std::make_unique<Queue>());
  return all.made[next].get();
}

State& state() {
  static State* const only = new State;
  return *only;
}

int num_devices() {
  return static_cast<int>(state().default_streams.size());
}

int current_device() {
  return device_of_thread;
}

void Mark::pass() {
  const std::lock_guard<std::mutex> lock(mutex_);
  passed_ = true;
  seconds_ = now();
  changed_.notify_all();
}

void Mark::wait() const {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return passed_; });
}

bool Mark::passed() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return passed_;
}

double Mark::seconds() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return seconds_;
}

void Queue::push(Work work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  work_.push_back(std::move(work));
  if (!started_) std::thread([this] { run(); }).detach();
  started_ = true;
  changed_.notify_one();
}

void Queue::run() {
  while (true) {
    Work work;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return !work_.empty(); });
      work = std::move(work_.front());
      work_.pop_front();
    }
    dawdle();
    work();
  }
}

Stream& stream_of(cudaStream_t stream) {
  if (stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread) {
    return state().default_streams[static_cast<std::size_t>(current_device())];
  }
  return *reinterpret_cast<Stream*>(stream);
}

cudaError_t failed(cudaError_t code) {
  last_error = code;
  return code;
}

cudaError_t put(cudaStream_t stream, Work work) {
  Stream& to = stream_of(stream);
  const std::lock_guard<std::mutex> lock(state().mutex);
  if (to.recording) {
    if (!to.recording->valid) return failed(cudaErrorStreamCaptureInvalidated);
    to.recording->add(&to, std::move(work));
  } else {
    to.queue->push(std::move(work));
  }
  return cudaSuccess;
}

cudaError_t launch(cudaStream_t stream, Work work) {
  if (stream_of(stream).device != current_device()) return failed(cudaErrorInvalidResourceHandle);
  return put(stream, std::move(work));
}

void wait_for_device() {
  std::vector<std::shared_ptr<Mark>> marks;
  {
    const std::lock_guard<std::mutex> lock(state().mutex);
    for (const auto& [which, queues] : state().queues) {
      if (which.first != current_device()) continue;
      for (const auto& queue : queues.made) {
        marks.push_back(std::make_shared<Mark>());
        queue->push([mark = marks.back()] { mark->pass(); });
      }
    }
  }
  for (const auto& mark : marks) mark->wait();
}

}  // namespace host_cuda

using namespace host_cuda;

extern "C" {

// Errors.

cudaError_t cudaGetLastError() {
  return std::exchange(last_error, cudaSuccess);
}
cudaError_t cudaPeekAtLastError() {
  return last_error;
}

// Devices.

cudaError_t cudaGetDeviceCount(int* count) {
  *count = num_devices();
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* index) {
  *index = current_device();
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int index) {
  if (index < 0 || index >= num_devices()) return failed(cudaErrorInvalidDevice);
  device_of_thread = index;
  return cudaSuccess;
}

// Streams.

cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  if (lowest != nullptr) *lowest = 0;
  if (highest != nullptr) *highest = kHighest;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* made, unsigned int flags, int priority) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  auto* stream = new Stream;
  stream->priority = std::min(0, std::max(kHighest, priority));
  stream->flags = flags;
  stream->device = current_device();
  stream->queue = state().deal(stream->device, stream->priority);
  state().streams.insert(stream);
  *made = reinterpret_cast<cudaStream_t>(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* made, unsigned int flags) {
  return cudaStreamCreateWithPriority(made, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* made) {
  return cudaStreamCreateWithFlags(made, cudaStreamDefault);
}

// What it has been given is done all the same.
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  auto* gone = &stream_of(stream);
  if (state().streams.erase(gone) == 0) return failed(cudaErrorInvalidResourceHandle);
  delete gone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream_of(stream).priority;
  return cudaSuccess;
}

cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned int* flags) {
  *flags = stream_of(stream).flags;
  return cudaSuccess;
}

cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* index) {
  *index = stream_of(stream).device;
  return cudaSuccess;
}

static cudaError_t spoil_if_captured(Stream& stream) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  if (!stream.recording) return cudaSuccess;
  stream.recording->valid = false;
  return failed(cudaErrorStreamCaptureUnsupported);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (const cudaError_t code = spoil_if_captured(stream_of(stream))) return code;
  if (const cudaError_t code = refuse_beside_capture()) return code;
  const auto mark = std::make_shared<Mark>();
  if (const cudaError_t code = put(stream, [mark] { mark->pass(); })) return code;
  mark->wait();
  return cudaSuccess;
}

// A queue is asked with a mark that may come a little later: what is done may be said not to be, as on a device.
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (const cudaError_t code = spoil_if_captured(stream_of(stream))) return code;
  if (const cudaError_t code = refuse_beside_capture()) return code;
  const auto mark = std::make_shared<Mark>();
  if (const cudaError_t code = put(stream, [mark] { mark->pass(); })) return code;
  std::this_thread::sleep_for(std::chrono::microseconds(50));
  return mark->passed() ? cudaSuccess : failed(cudaErrorNotReady);
}

cudaError_t cudaDeviceSynchronize() {
  {
    const std::lock_guard<std::mutex> lock(state().mutex);
    for (const auto& capture : state().captures) capture->valid = false;
    if (!state().captures.empty()) return failed(cudaErrorStreamCaptureUnsupported);
  }
  wait_for_device();
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return put(stream, [function, data] { function(data); });
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned int) {
  return put(stream, [stream, function, data] { function(stream, cudaSuccess, data); });
}

// Events.

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* made, unsigned int flags) {
  auto* event = new Event;
  event->timed = (flags & cudaEventDisableTiming) == 0;
  event->device = current_device();
  *made = reinterpret_cast<cudaEvent_t>(event);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* made) {
  return cudaEventCreateWithFlags(made, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  delete &event_of(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned int flags) {
  Stream& in = stream_of(stream);
  Event& recorded = event_of(event);
  const auto mark = std::make_shared<Mark>();
  const std::lock_guard<std::mutex> lock(state().mutex);
  if (recorded.device != in.device) return failed(cudaErrorInvalidResourceHandle);
  if (in.recording && !in.recording->valid) return failed(cudaErrorStreamCaptureInvalidated);
  if (in.recording && (flags & cudaEventRecordExternal) == 0) {
    recorded = Event{recorded.device, recorded.timed, nullptr, in.recording, in.recording->clock(&in)};
  } else if (in.recording) {
    return failed(cudaErrorNotSupported);  // of nobody's use here
  } else {
    recorded = Event{recorded.device, recorded.timed, mark, nullptr, {}};
    in.queue->push([mark] { mark->pass(); });
  }
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
  Stream& waiting = stream_of(stream);
  const std::lock_guard<std::mutex> lock(state().mutex);
  const Event& awaited = event_of(event);
  if (awaited.recording) {
    if (!awaited.recording->valid) return failed(cudaErrorStreamCaptureInvalidated);
    if (state().captures.count(awaited.recording) == 0) return failed(cudaErrorCapturedEvent);
    if (waiting.recording && waiting.recording != awaited.recording) return failed(cudaErrorStreamCaptureMerge);
    waiting.recording = awaited.recording;
    waiting.recording->join(&waiting, awaited.clock);
  } else if (waiting.recording) {
    if (awaited.mark == nullptr) return cudaSuccess;
    waiting.recording->valid = false;
    return failed(cudaErrorStreamCaptureIsolation);
  } else if (awaited.mark != nullptr) {
    waiting.queue->push([mark = awaited.mark] { mark->wait(); });
  }
  return cudaSuccess;
}

static cudaError_t mark_of(cudaEvent_t event, std::shared_ptr<Mark>* mark) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  if (const auto& recording = event_of(event).recording) {
    recording->valid = false;
    return failed(cudaErrorCapturedEvent);
  }
  *mark = event_of(event).mark;
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  std::shared_ptr<Mark> mark;
  if (const cudaError_t code = mark_of(event, &mark)) return code;
  if (const cudaError_t code = refuse_beside_capture()) return code;
  return mark == nullptr || mark->passed() ? cudaSuccess : failed(cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  std::shared_ptr<Mark> mark;
  if (const cudaError_t code = mark_of(event, &mark)) return code;
  if (const cudaError_t code = refuse_beside_capture()) return code;
  if (mark != nullptr) mark->wait();
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  std::shared_ptr<Mark> begin, end;
  if (const cudaError_t code = mark_of(from, &begin)) return code;
  if (const cudaError_t code = mark_of(to, &end)) return code;
  if (begin == nullptr || end == nullptr || !event_of(from).timed || !event_of(to).timed) {
    return failed(cudaErrorInvalidResourceHandle);
  }
  if (!begin->passed() || !end->passed()) return failed(cudaErrorNotReady);
  *milliseconds = static_cast<float>((end->seconds() - begin->seconds()) * 1e3);
  return cudaSuccess;
}

// For another process an event has always been reached: who gives it away waits until it is.

cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* handle, cudaEvent_t event) {
  *handle = {};
  return cudaEventSynchronize(event);
}

cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* made, cudaIpcEventHandle_t) {
  return cudaEventCreateWithFlags(made, cudaEventDisableTiming);
}

}  // extern "C"
