// What a rank needs for one program beside the program: made on every rank, in the same order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "codec.h"
#include "shared_memory_link.h"
#include "transport.h"

namespace fastpipe {

// What a channel needs in a step, by the programs of both its ends.
struct ChannelNeeds {
  std::int32_t slots = 0;  // how many receives are at most posted and not freed
  std::int32_t messages = 0;
};

// Those between two ranks.
std::vector<bool> channels_between_ranks(const std::vector<Channel>& channels);

// Adds what a rank's program tells of the channels on which it receives.
void count_needs(const RankProgram& program, std::vector<ChannelNeeds>& needs);

class SharedMemorySource final : public TransportSource {
 public:
  // carried: by channel, whether it goes through shared memory; what stays on a rank does not.
  SharedMemorySource(std::shared_ptr<SharedMemoryLink> link, std::shared_ptr<const Codec> codec,
                     std::vector<ChannelNeeds> needs, std::vector<bool> carried);

  std::unique_ptr<Transport> connect(const RankProgram& program, double timeout_seconds) override;
  // Throws ArgumentError for a program that it was not made for.
  void check(const RankProgram& program) const;

  const std::shared_ptr<SharedMemoryLink>& link() const { return link_; }
  const std::shared_ptr<const Codec>& codec() const { return codec_; }
  const ChannelNeeds& needs(std::size_t channel) const { return needs_.at(channel); }
  bool carries(std::size_t channel) const { return carried_.at(channel); }
  std::size_t number() const { return number_; }
  // Differs when the ranks do not mean the same program.
  std::uint64_t fingerprint() const;

 private:
  std::shared_ptr<SharedMemoryLink> link_;
  std::shared_ptr<const Codec> codec_;
  std::vector<ChannelNeeds> needs_;
  std::vector<bool> carried_;
  std::size_t number_;
};

}  // namespace fastpipe
