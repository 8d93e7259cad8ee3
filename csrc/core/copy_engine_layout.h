// What the two ends of a channel share in the host's memory when messages go by copy engines.
//
// The receiver of a program has one segment: a table of offsets, by channel (0: not one that it receives on), and at
// each offset the words of a channel.
#pragma once

#include <cstddef>
#include <cstdint>

#include "copy_engine.h"
#include "shared_memory_layout.h"

namespace fastpipe {

struct CopyWords {
  // Counted up by the devices, message by message of all known steps; the hosts read them, and set them far ahead when
  // they give up.
  alignas(kSharedLine) SharedWord granted;  // by the receiver: the message's place may be written
  alignas(kSharedLine) SharedWord arrived;  // by the sender: the message is there

  // The receiver's host.
  alignas(kSharedLine) SharedNumber place_bytes;  // of every place; written last
  CopyTicket ticket;
  SharedWord refused;  // it could not get as much memory as the step needs

  // The sender's host.
  alignas(kSharedLine) SharedNumber stand_ins;  // the number of a step's first stand-in, from 1
  SharedWord closed;                            // it will not touch the places any more

  // Either host: it has given up or is done, and whoever waits for more need not wait until the time is over.
  alignas(kSharedLine) SharedWord given_up;
};

// Further than the messages of any step that can be under way, and not so far that it would count as behind.
constexpr std::uint32_t kFarAhead = std::uint32_t{1} << 30;

// Tensors begin where an allocator of a device would put them: kernels are chosen by it, and with them the last bits.
constexpr std::size_t whole_blocks(std::size_t bytes) {
  constexpr std::size_t kBlock = 512;
  return (bytes + kBlock - 1) / kBlock * kBlock;
}

// On the circle of 32 bits.
constexpr bool has_come(std::uint32_t flag, std::uint32_t value) {
  return static_cast<std::int32_t>(flag - value) >= 0;
}

}  // namespace fastpipe
