// Ranks that are connected by loopback, each channel a lane of its own.
#pragma once

#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

#include "harness.h"

namespace fastpipe::testing {

// delay, timeout: in seconds.
inline Ranks ranks_over_loopback(const Shape& shape, std::uint32_t seed, double delay, double timeout = kPatience) {
  const RandomPrograms programs(shape, seed);
  std::vector<std::int32_t> lanes(programs.channels().size());
  std::iota(lanes.begin(), lanes.end(), 0);
  const Connect connect = over_loopback(programs.channels(), lanes, delay);
  return {programs, [&](const RankProgram& program) { return connect(program, timeout); }};
}

}  // namespace fastpipe::testing
