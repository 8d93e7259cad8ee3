// Ranks that are connected by shared memory within hosts, and by loopback between them.
#pragma once

#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

#include "harness.h"
#include "shared_memory_ranks.h"

namespace fastpipe::testing {

using Hosts = std::vector<std::int32_t>;  // by rank

inline std::vector<bool> within_hosts(const std::vector<Channel>& channels, const Hosts& hosts) {
  std::vector<bool> near;
  for (const Channel& channel : channels) {
    near.push_back(!channel.local() && hosts[channel.source] == hosts[channel.destination]);
  }
  return near;
}

// keep: how many messages' memory a rank holds on to.
inline Ranks ranks_on_hosts(const Shape& shape, std::uint32_t seed, const Hosts& hosts, std::size_t keep) {
  const RandomPrograms programs(shape, seed);
  std::vector<std::int32_t> lanes(programs.channels().size());
  std::iota(lanes.begin(), lanes.end(), 0);
  const Connect far = over_loopback(programs.channels(), lanes, seed % 3 == 0 ? 0.0005 : 0);
  const auto near = within_hosts(programs.channels(), hosts);
  const auto links =
      make_links(shape, [&](std::int32_t one, std::int32_t other) { return hosts[one] == hosts[other]; });
  return {programs, [&](const RankProgram& program) {
            return over_both(make_plan(links[program.rank()], programs, near, keep), far)(program, kPatience);
          }};
}

}  // namespace fastpipe::testing
