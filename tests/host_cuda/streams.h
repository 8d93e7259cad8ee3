// Streams, events and recordings of a device that does not exist. What is put into a stream is run by a thread, so that
// what a program does not order may happen in any order, and what waits really waits.
#pragma once

#include <cuda_runtime_api.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace host_cuda {

using Work = std::function<void()>;

// A point in a stream, that is passed at some time.
class Mark {
 public:
  void pass();
  void wait() const;
  bool passed() const;
  double seconds() const;  // when

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool passed_ = false;
  double seconds_ = 0.0;
};

// A queue of the hardware. It does its work one after the other: what waits at its head holds up all the rest, whatever
// stream that is from.
class Queue {
 public:
  void push(Work work);

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> work_;
  bool started_ = false;
};

struct Stream;

// How much of every captured stream is before a point.
using Clock = std::map<const Stream*, std::size_t>;

// What was put into streams while they were captured: by stream, since what is in several may happen in any order that
// the waits in between allow.
class Recording {
 public:
  Recording(const Stream* origin, cudaStreamCaptureMode mode, std::uint64_t id) : origin(origin), mode(mode), id(id) {}

  void add(const Stream* stream, Work work);
  void join(const Stream* stream, const Clock& before);
  bool joined(const Stream* stream) const { return chains_.count(stream) != 0; }
  Clock clock(const Stream* stream) const;
  // Whether all that other streams have is before the origin's end.
  bool all_joined() const;
  std::size_t num_nodes() const;
  // All of it, with as much at once as the order leaves.
  void run() const;

  const Stream* const origin;
  const cudaStreamCaptureMode mode;
  const std::uint64_t id;
  bool valid = true;

 private:
  struct Node {
    Clock before;
    Work work;
  };
  struct Chain {
    Clock known;
    std::vector<Node> nodes;
  };
  std::map<const Stream*, Chain> chains_;
};

struct Stream {
  int device = 0;
  Queue* queue = nullptr;
  int priority = 0;
  unsigned int flags = 0;
  std::shared_ptr<Recording> recording;  // while it is captured
};

struct Event {
  int device = 0;
  bool timed = false;
  std::shared_ptr<Mark> mark;            // where it was recorded last
  std::shared_ptr<Recording> recording;  // that it was recorded in, and then no mark
  Clock clock;
};

int num_devices();
int current_device();  // of this thread

// The stream that a handle means.
Stream& stream_of(cudaStream_t stream);

// Into the stream, or the recording that it is part of.
cudaError_t put(cudaStream_t stream, Work work);
// A kernel, that is: on a device that is not the current one it cannot be launched.
cudaError_t launch(cudaStream_t stream, Work work);

// Until the current device has done all it has been given.
void wait_for_device();

// Some calls are not allowed beside a capture, and spoil it.
cudaError_t refuse_beside_capture();

// The error is also what cudaGetLastError gives next.
cudaError_t failed(cudaError_t code);

}  // namespace host_cuda
