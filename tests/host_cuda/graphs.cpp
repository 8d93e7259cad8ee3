// Streams that are captured, and the graphs that this makes.
#include <algorithm>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "state.h"

namespace host_cuda {

namespace {

using Captures = std::set<std::shared_ptr<Recording>>;

thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
thread_local Captures* begun_here = nullptr;

// Never freed: a thread may end while others are at work.
Captures& captures_of_thread() {
  if (begun_here == nullptr) begun_here = new Captures;
  return *begun_here;
}

}  // namespace

void Recording::add(const Stream* stream, Work work) {
  Chain& chain = chains_[stream];
  chain.nodes.push_back({chain.known, std::move(work)});
  chain.known[stream] = chain.nodes.size();
}

void Recording::join(const Stream* stream, const Clock& before) {
  Clock& known = chains_[stream].known;
  for (const auto& [other, count] : before) known[other] = std::max(known[other], count);
}

Clock Recording::clock(const Stream* stream) const {
  const auto found = chains_.find(stream);
  return found == chains_.end() ? Clock{} : found->second.known;
}

bool Recording::all_joined() const {
  const Clock end = clock(origin);
  for (const auto& [stream, chain] : chains_) {
    const auto found = end.find(stream);
    if (!chain.nodes.empty() && (found == end.end() || found->second != chain.nodes.size())) return false;
  }
  return true;
}

std::size_t Recording::num_nodes() const {
  std::size_t count = 0;
  for (const auto& [stream, chain] : chains_) count += chain.nodes.size();
  return count;
}

void Recording::run() const {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<const Stream*, std::size_t> done;
  const auto follow = [&](const Stream* stream, const Chain& chain) {
    for (const Node& node : chain.nodes) {
      {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] {
          for (const auto& [other, count] : node.before) {
            if (done[other] < count) return false;
          }
          return true;
        });
      }
      dawdle();
      node.work();
      const std::lock_guard<std::mutex> lock(mutex);
      ++done[stream];
      changed.notify_all();
    }
  };
  std::vector<std::thread> threads;
  for (const auto& [stream, chain] : chains_) {
    if (!chain.nodes.empty()) threads.emplace_back(follow, stream, std::cref(chain));
  }
  for (std::thread& thread : threads) thread.join();
}

cudaError_t refuse_beside_capture() {
  if (capture_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  const std::lock_guard<std::mutex> lock(state().mutex);
  bool refused = false;
  for (const auto& capture : state().captures) {
    const bool own = captures_of_thread().count(capture) != 0 && capture->mode != cudaStreamCaptureModeRelaxed;
    const bool others = capture_mode == cudaStreamCaptureModeGlobal && capture->mode == cudaStreamCaptureModeGlobal;
    if (!own && !others) continue;
    capture->valid = false;
    refused = true;
  }
  return refused ? failed(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

}  // namespace host_cuda

using namespace host_cuda;

extern "C" {

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(capture_mode, *mode);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  Stream& origin = stream_of(stream);
  const std::lock_guard<std::mutex> lock(state().mutex);
  if (&origin == &stream_of(nullptr)) return failed(cudaErrorStreamCaptureUnsupported);
  if (origin.recording) return failed(cudaErrorIllegalState);
  origin.recording = std::make_shared<Recording>(&origin, mode, ++state().last_capture);
  state().captures.insert(origin.recording);
  captures_of_thread().insert(origin.recording);
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  Stream& origin = stream_of(stream);
  const std::lock_guard<std::mutex> lock(state().mutex);
  *graph = nullptr;
  const auto recording = origin.recording;
  if (!recording) return failed(cudaErrorIllegalState);
  if (recording->origin != &origin) return failed(cudaErrorStreamCaptureUnmatched);
  if (recording->mode != cudaStreamCaptureModeRelaxed && captures_of_thread().count(recording) == 0) {
    return failed(cudaErrorStreamCaptureWrongThread);
  }
  state().captures.erase(recording);
  captures_of_thread().erase(recording);
  origin.recording = nullptr;
  for (Stream* other : state().streams) {
    if (other->recording == recording) other->recording = nullptr;
  }
  if (!recording->valid) return failed(cudaErrorStreamCaptureInvalidated);
  if (!recording->all_joined()) return failed(cudaErrorStreamCaptureUnjoined);
  *graph = reinterpret_cast<cudaGraph_t>(new std::shared_ptr<Recording>(recording));
  return cudaSuccess;
}

static cudaStreamCaptureStatus status_of(const Stream& stream) {
  if (!stream.recording) return cudaStreamCaptureStatusNone;
  return stream.recording->valid ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusInvalidated;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  *status = status_of(stream_of(stream));
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges, size_t* num_dependencies) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  const Stream& asked = stream_of(stream);
  *status = status_of(asked);
  if (id != nullptr) *id = asked.recording ? asked.recording->id : 0;
  if (graph != nullptr) *graph = nullptr;
  if (dependencies != nullptr) *dependencies = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (num_dependencies != nullptr) *num_dependencies = 0;
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = (*reinterpret_cast<std::shared_ptr<Recording>*>(graph))->num_nodes();
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  *made = reinterpret_cast<cudaGraphExec_t>(
      new std::shared_ptr<Recording>(*reinterpret_cast<std::shared_ptr<Recording>*>(graph)));
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<std::shared_ptr<Recording>*>(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete reinterpret_cast<std::shared_ptr<Recording>*>(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  return put(stream, [recording = *reinterpret_cast<std::shared_ptr<Recording>*>(graph)] { recording->run(); });
}

}  // extern "C"
