// Ranks whose messages are copied by engines of threads, with numbers for messages.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "core/copy_engine_codec.h"
#include "core/copy_engine_link.h"
#include "core/copy_engine_source.h"
#include "host_copy_engine.h"
#include "shared_memory_ranks.h"

namespace fastpipe::testing {

// Numbers, copied out.
class StubCopyCodec final : public CopyCodec {
 public:
  std::size_t size(const Spec& spec) const override { return 8 * static_cast<const StubSpec&>(spec).size; }
  void list(const Payload& payload, std::vector<CopyPart>& parts) const override {
    const auto& numbers = static_cast<const StubPayload&>(payload).numbers;
    parts.push_back({reinterpret_cast<const std::byte*>(numbers.data()), 8 * numbers.size()});
  }
  std::shared_ptr<const void> duplicate(std::vector<CopyPart>& parts) const override {
    auto copies = std::make_shared<std::vector<std::vector<std::byte>>>();
    for (CopyPart& part : parts) {
      copies->emplace_back(part.data, part.data + part.bytes);
      part.data = copies->back().data();
    }
    return copies;
  }
  void adopt(Payload& into, const Spec& spec, CopyLoan loan) const override {
    auto& numbers = static_cast<StubPayload&>(into).numbers;
    numbers.resize(static_cast<const StubSpec&>(spec).size);
    std::memcpy(numbers.data(), loan.data(), 8 * numbers.size());
    std::memset(loan.data(), 0xff, 8 * numbers.size());  // who reads it again, or did not own it, is found out
    loan.end();
  }
};

inline std::vector<CopyPlaces> places_of(const RandomPrograms& programs) {
  std::vector<CopyPlaces> places(programs.channels().size());
  for (std::int32_t rank = 0; rank < programs.shape().num_ranks; ++rank) add_places(programs.program(rank), places);
  return places;
}

inline std::unique_ptr<Transport> connect_engines(const Link& link, const RandomPrograms& programs,
                                                  const RankProgram& program, std::uint32_t seed, double timeout) {
  const auto engine = std::make_shared<HostCopyEngine>(seed);
  auto announced = make_source(link, programs, channels_between_ranks(programs.channels()), 0);
  CopyEngineSource source(std::make_shared<CopyEngineLink>(link, engine), std::make_shared<StubCopyCodec>(),
                          std::move(announced), places_of(programs));
  return source.connect(program, timeout);
}

inline Ranks ranks_over_engines(const Shape& shape, std::uint32_t seed, double timeout = 20) {
  const RandomPrograms programs(shape, seed);
  const std::vector<Link> links = make_links(shape, [](std::int32_t, std::int32_t) { return true; });
  return {programs, [&](const RankProgram& program) {
            return connect_engines(links[program.rank()], programs, program, seed, timeout);
          }};
}

}  // namespace fastpipe::testing
