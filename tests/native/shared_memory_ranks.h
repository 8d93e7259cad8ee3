// Ranks that are connected by shared memory, with numbers for messages.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "core/common.h"
#include "core/host_memory.h"
#include "core/shared_memory_transport.h"
#include "harness.h"

namespace fastpipe::testing {

// Numbers, copied out. Some leases are kept for a while, as a stage keeps a tensor.
class StubCodec final : public Codec {
 public:
  explicit StubCodec(std::size_t keep) : kept_(keep) {}

  std::size_t size(const Payload& payload, bool) const override {
    return 8 * (1 + static_cast<const StubPayload&>(payload).numbers.size());
  }
  void write(const Payload& payload, const CellBytes& to) const override {
    const auto& numbers = static_cast<const StubPayload&>(payload).numbers;
    const auto count = static_cast<std::int64_t>(numbers.size());
    std::memcpy(to.data, &count, 8);
    std::memcpy(to.data + 8, numbers.data(), 8 * numbers.size());
  }
  std::unique_ptr<Spec> read_spec(const CellBytes& from) const override {
    std::int64_t count = 0;
    std::memcpy(&count, from.data, 8);
    return std::make_unique<StubSpec>(static_cast<std::size_t>(count));
  }
  void adopt(Payload& into, const Spec& spec, const CellBytes& from, SharedMemoryLease lease) const override {
    const std::size_t count = static_cast<const StubSpec&>(spec).size;
    if (from.size != 8 * (1 + count)) throw Error("a message of the wrong size");
    auto& numbers = static_cast<StubPayload&>(into).numbers;
    numbers.resize(count);
    std::memcpy(numbers.data(), from.data + 8, 8 * count);
    std::memset(from.data, 0xff, from.size);  // who reads it again, or did not own it, is found out
    if (!kept_.empty()) kept_[next_++ % kept_.size()] = std::move(lease);
  }

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

 private:
  mutable std::vector<SharedMemoryLease> kept_;
  mutable std::size_t next_ = 0;
};

using Link = std::shared_ptr<SharedMemoryLink>;

inline Link make_link(const Shape& shape, std::int32_t rank) {
  const auto spin = std::chrono::microseconds(shape.num_microbatches % 2 == 0 ? 20 : 0);
  return std::make_shared<SharedMemoryLink>(rank, shape.num_ranks, spin);
}

// The sides of all ranks; `sees` says who is connected to whom.
inline std::vector<Link> make_links(const Shape& shape, const std::function<bool(std::int32_t, std::int32_t)>& sees) {
  std::vector<Link> links;
  for (std::int32_t rank = 0; rank < shape.num_ranks; ++rank) links.push_back(make_link(shape, rank));
  for (const Link& link : links) {
    for (const Link& other : links) {
      if (other != link && sees(link->rank(), other->rank())) link->connect(other->rank(), other->address());
    }
  }
  return links;
}

// carried: by channel, whether it goes through shared memory. keep: how many messages' memory a rank holds on to.
inline std::shared_ptr<SharedMemoryChannels> make_plan(const Link& link, const RandomPrograms& programs,
                                                       std::vector<bool> carried, std::size_t keep) {
  std::vector<ChannelNeeds> needs(programs.channels().size());
  for (std::int32_t rank = 0; rank < programs.shape().num_ranks; ++rank) count_needs(programs.program(rank), needs);
  return std::make_shared<SharedMemoryChannels>(link, std::make_shared<StubCodec>(keep), std::move(needs),
                                                std::move(carried));
}

inline std::unique_ptr<Transport> connect(const Link& link, const RandomPrograms& programs, const RankProgram& program,
                                          std::size_t keep) {
  return over_shared_memory(make_plan(link, programs, channels_between_ranks(programs.channels()), keep))(program,
                                                                                                          kPatience);
}

inline Ranks ranks_over_shared_memory(const Shape& shape, std::uint32_t seed, std::size_t keep) {
  const RandomPrograms programs(shape, seed);
  const std::vector<Link> links = make_links(shape, [](std::int32_t, std::int32_t) { return true; });
  return {programs,
          [&](const RankProgram& program) { return connect(links[program.rank()], programs, program, keep); }};
}

}  // namespace fastpipe::testing
