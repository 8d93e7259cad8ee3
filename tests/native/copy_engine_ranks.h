// Ranks whose messages are copied by engines of threads, with numbers for messages.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/copy_engine_transport.h"
#include "host_copy_engine.h"
#include "shared_memory_ranks.h"

namespace fastpipe::testing {

inline std::vector<CopyPlaces> places_of(const RandomPrograms& programs) {
  std::vector<CopyPlaces> places(programs.channels().size());
  for (std::int32_t rank = 0; rank < programs.shape().num_ranks; ++rank) add_places(programs.program(rank), places);
  return places;
}

using CopyLink = std::shared_ptr<CopyEngineLink>;

inline CopyLink link_engine(const Link& link, std::shared_ptr<CopyEngine> engine, double timeout) {
  return std::make_shared<CopyEngineLink>(link, std::move(engine), timeout);
}

inline std::unique_ptr<Transport> connect_engines(const CopyLink& link, const RandomPrograms& programs,
                                                  const RankProgram& program) {
  auto announced = make_plan(link->host(), programs, channels_between_ranks(programs.channels()), 0);
  return over_copy_engines(link, std::move(announced), places_of(programs))(program, link->timeout_seconds());
}

inline Ranks ranks_over_engines(const Shape& shape, std::uint32_t seed, double timeout = kPatience) {
  const RandomPrograms programs(shape, seed);
  const std::vector<Link> links = make_links(shape, [](std::int32_t, std::int32_t) { return true; });
  return {programs, [&](const RankProgram& program) {
            const auto engine = std::make_shared<HostCopyEngine>(seed);
            return connect_engines(link_engine(links[program.rank()], engine, timeout), programs, program);
          }};
}

}  // namespace fastpipe::testing
