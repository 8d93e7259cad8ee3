// The clock of all spans; on Linux the one that Python's time.perf_counter reads.
#pragma once

#include <algorithm>
#include <chrono>

namespace fastpipe {

using Clock = std::chrono::steady_clock;

inline double seconds(Clock::time_point time) {
  return std::chrono::duration<double>(time.time_since_epoch()).count();
}

inline double now_seconds() {
  return seconds(Clock::now());
}

// A century at most, so that a deadline does not overflow.
inline Clock::duration as_duration(double seconds) {
  seconds = std::min(seconds, 3.2e9);
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

}  // namespace fastpipe
