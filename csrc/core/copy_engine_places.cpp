#include "copy_engine_places.h"

#include <map>
#include <utility>

namespace fastpipe {

void add_places(const RankProgram& program, std::vector<CopyPlaces>& places) {
  std::map<std::pair<std::int32_t, std::int32_t>, std::int32_t> place_of;  // by channel and slot
  for (std::size_t position = 0; position < program.size(); ++position) {
    const Instruction it = program[position];
    if (it.op != Op::kPostRecv) continue;
    CopyPlaces& channel = places.at(it.channel);
    const auto [found, is_new] = place_of.try_emplace({it.channel, it.slot}, channel.count);
    channel.count += is_new ? 1 : 0;
    channel.of_message.push_back(found->second);
  }
}

std::uint64_t fingerprint(const std::vector<CopyPlaces>& places) {
  std::uint64_t sum = 0xcbf29ce484222325;  // FNV
  const auto add = [&](std::int32_t number) { sum = (sum ^ static_cast<std::uint64_t>(number)) * 0x100000001b3; };
  for (const CopyPlaces& channel : places) {
    add(channel.count);
    for (const std::int32_t place : channel.of_message) add(place);
  }
  return sum;
}

}  // namespace fastpipe
