// The streams of a device and the order among them, and when they come to a point. In c10's words, so for any device.
// A CPU has none: there nothing is made, recorded or waited for.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/program.h"

namespace fastpipe {

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

// When a rank's instructions ran on a device with streams, and not when the host launched them.

// Events, recorded while a step is queued, each on the stream that is current then, and read when the device has done
// all of it. An F and a B that overlap have a span each; their instruction lasts from the first start to the last end.
class DeviceTimes {
 public:
  DeviceTimes(const RankProgram& program, c10::Device device);

  // A step begins.
  void forget();
  void starts(std::size_t position) noexcept { note(spans_[position].start); }
  void ends(std::size_t position) noexcept { note(spans_[position].end); }
  // Of an F, B, I or W, whichever instruction it belongs to.
  void starts(Op op, std::int32_t stage, std::int32_t microbatch) noexcept { starts(place(op, stage, microbatch)); }
  void ends(Op op, std::int32_t stage, std::int32_t microbatch) noexcept { ends(place(op, stage, microbatch)); }
  // Waits for the device. Writes the times of every instruction that was noted, in seconds of the steady clock.
  void read(double* start, double* end) const;

 private:
  struct Point {
    std::optional<c10::Event> event;  // made once, recorded in every traced step
    bool noted = false;
  };
  struct Span {
    Point start;
    Point end;
  };
  // The same moment on the device's clock and on the host's.
  struct ClockPair {
    c10::Event event;
    double seconds;
  };

  void note(Point& point) noexcept;
  std::size_t place(Op op, std::int32_t stage, std::int32_t microbatch) const noexcept;
  ClockPair read_clocks() const;

  c10::Device device_;
  c10::Stream side_;         // where nobody works
  std::vector<Span> spans_;  // of the instructions, then of the backwards of pairs
  std::unordered_map<std::uint64_t, std::size_t> places_;
  std::vector<std::size_t> pairs_;                          // the instructions that those backwards belong to
  std::vector<std::pair<std::size_t, std::size_t>> waits_;  // a SEND, and the WAIT_SEND at which it ends
};

// One action on the current stream.
class Timed {
 public:
  Timed(DeviceTimes* times, Op op, std::int32_t stage, std::int32_t microbatch) noexcept
      : times_(times), op_(op), stage_(stage), microbatch_(microbatch) {
    if (times_ != nullptr) times_->starts(op, stage, microbatch);
  }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;
  ~Timed() {
    if (times_ != nullptr) times_->ends(op_, stage_, microbatch_);
  }

 private:
  DeviceTimes* times_;
  Op op_;
  std::int32_t stage_;
  std::int32_t microbatch_;
};

}  // namespace fastpipe
