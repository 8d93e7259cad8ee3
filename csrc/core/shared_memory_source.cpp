#include "shared_memory_source.h"

#include <algorithm>
#include <string>
#include <utility>

#include "errors.h"
#include "shared_memory_transport.h"

namespace fastpipe {

std::vector<bool> channels_between_ranks(const std::vector<Channel>& channels) {
  std::vector<bool> found;
  for (const Channel& channel : channels) found.push_back(!channel.local());
  return found;
}

void count_needs(const RankProgram& program, std::vector<ChannelNeeds>& needs) {
  std::vector<std::int32_t> in_use(needs.size());
  for (std::size_t position = 0; position < program.size(); ++position) {
    const Instruction it = program[position];
    if (it.channel == kNone || program.channels()[it.channel].local()) continue;
    ChannelNeeds& channel = needs.at(it.channel);
    if (it.op == Op::kPostRecv) {
      ++channel.messages;
      channel.slots = std::max(channel.slots, ++in_use[it.channel]);
    } else if (it.op == Op::kFree) {
      --in_use[it.channel];
    }
  }
}

SharedMemorySource::SharedMemorySource(std::shared_ptr<SharedMemoryLink> link, std::shared_ptr<const Codec> codec,
                                       std::vector<ChannelNeeds> needs, std::vector<bool> carried)
    : link_(std::move(link)),
      codec_(std::move(codec)),
      needs_(std::move(needs)),
      carried_(std::move(carried)),
      number_(link_->number_program()) {}

std::unique_ptr<Transport> SharedMemorySource::connect(const RankProgram& program, double timeout_seconds) {
  check(program);
  return std::make_unique<SharedMemoryTransport>(*this, program, timeout_seconds);
}

void SharedMemorySource::check(const RankProgram& program) const {
  if (program.rank() == link_->rank() && program.channels().size() == needs_.size()) return;
  throw ArgumentError("this shared memory was made for " + std::to_string(needs_.size()) + " channels and rank " +
                      std::to_string(link_->rank()) + ", the program has " + std::to_string(program.channels().size()) +
                      " and is rank " + std::to_string(program.rank()) + "'s; make a source for each program");
}

std::uint64_t SharedMemorySource::fingerprint() const {
  std::uint64_t sum = 0xcbf29ce484222325;  // FNV
  for (const ChannelNeeds& channel : needs_) {
    for (const std::int32_t number : {channel.slots, channel.messages}) {
      sum = (sum ^ static_cast<std::uint64_t>(number)) * 0x100000001b3;
    }
  }
  return sum;
}

}  // namespace fastpipe
