// Where messages go that are copied by engines: every message of a step has a place in its receiver's memory, known to
// both ends from the receiver's program.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "program.h"

namespace fastpipe {

// Of one channel.
struct CopyPlaces {
  std::vector<std::int32_t> of_message;  // by the message's number in the step
  std::int32_t count = 0;

  std::int32_t of(std::uint64_t message) const { return of_message[message % of_message.size()]; }
  std::uint64_t step_of(std::uint64_t message) const { return message / of_message.size(); }
};

// Adds those of the channels on which a rank receives: a place for each slot that the channel ever fills.
void add_places(const RankProgram& program, std::vector<CopyPlaces>& places);

// Differs when the ranks do not mean the same program.
std::uint64_t fingerprint(const std::vector<CopyPlaces>& places);

}  // namespace fastpipe
