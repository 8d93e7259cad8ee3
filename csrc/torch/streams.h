// The streams of a device and the order among them, in c10's words, so for any device. A CPU has none: there nothing is
// made, recorded or waited for.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <cstddef>
#include <optional>
#include <vector>

namespace fastpipe {

// On which the calling thread's work for the device goes.
c10::Stream current_stream(c10::Device device);

// A point in a stream that other streams wait for; no host waits.
class Fence {
 public:
  // Behind all that the current stream of the device has.
  void record(c10::Device device);
  // What the device's current stream gets from now on comes after it. Nothing if nothing was recorded.
  void wait() const;
  bool recorded() const { return recorded_; }
  void forget() { recorded_ = false; }

 private:
  std::optional<c10::Event> event_;  // made once, recorded again and again
  bool recorded_ = false;
};

// While it exists, work of this thread goes into a stream; where there is none, into the current one.
class InStream {
 public:
  explicit InStream(const std::optional<c10::Stream>& stream) {
    if (stream) guard_.emplace(*stream);
  }

 private:
  std::optional<c10::StreamGuard> guard_;
};

// Those of one rank's stages. Or none: then all its work goes into the stream that is current when a step is called.
// They are given, for all programs of a rank use the same: torch keeps memory by stream, and cuBLAS's workspaces too,
// and has only 32 streams, which it hands out in turns.
class StageStreams {
 public:
  StageStreams(c10::Device device, std::vector<c10::Stream> streams);

  bool any() const { return !streams_.empty(); }
  std::size_t size() const { return streams_.size(); }
  std::optional<c10::Stream> of(std::size_t stage) const;
  // Around a step: the stages' streams come after what the caller's has, and the caller's after theirs.
  void fork();
  void join();
  // The caller's, for other threads of the step; none on a CPU.
  const std::optional<c10::Stream>& caller() const { return caller_; }

 private:
  c10::Device device_;
  std::vector<c10::Stream> streams_;
  std::vector<Fence> ends_;
  Fence start_;
  std::optional<c10::Stream> caller_;
};

// The memory belongs to another stream: it must not be used again while what the current stream has now works with it.
void keep_for_current_stream(const c10::DataPtr& data);

}  // namespace fastpipe
