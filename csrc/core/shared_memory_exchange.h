// An all-gather of bytes between the processes of one host, in their shared memory: every rank posts a message and
// waits for those of all others.
//
// Each rank publishes ExchangeWords, which it alone writes. `posted` is written last and publishes the message, by a
// release that SharedMemoryExchange::arrived() acquires; wake-ups and killed processes are as in host_memory.h, with
// `posted` as (a). Two messages are enough: a rank posts n + 1 when it has read n of every other, so its n - 1, whose
// place that is, has been read by every rank that has posted n. Should a rank have gone on without the others (its user
// interrupted a wait), its `posted` is beyond theirs, and the exchange is refused.
//
// What is too large lies in memory of its own, which goes with its process. So where there was such a message every
// rank, having read it, posts once more, and waits: nobody ends, or unmaps it, before that. (The words themselves stay,
// for those that have mapped them.)
//
// A rank that waits sleeps for the first rank that is missing, and is woken by that one alone.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common.h"
#include "host_memory.h"

namespace fastpipe {

constexpr std::size_t kExchangeBytes = 16384;

struct ExchangeMessage {
  std::uint64_t bytes;
  std::int32_t descriptor;  // of the memory that it lies in; -1: in `inline_bytes`
  alignas(kSharedLine) std::byte inline_bytes[kExchangeBytes];
};

struct ExchangeWords : PublishedWords {
  static constexpr std::uint64_t kMagic = 0x3178657069707466;

  alignas(kSharedLine) SharedNumber posted;          // messages ever written; written last
  alignas(kSharedLine) ExchangeMessage messages[2];  // of odd numbers, and of even ones
};

class SharedMemoryExchange final {
 public:
  // spin: how long to poll before sleeping.
  SharedMemoryExchange(std::int32_t rank, std::int32_t num_ranks, Clock::duration spin)
      : rank_(rank), spin_(spin), peers_(num_ranks), dead_(num_ranks) {}
  SharedMemoryExchange(std::int32_t rank, std::int32_t num_ranks)
      : SharedMemoryExchange(rank, num_ranks, usual_spin(num_ranks)) {}

  // How many ranks compute on this host, this exchange's or not: polling pays only where a core is free.
  void share_host(std::int32_t num_ranks) { spin_ = usual_spin(num_ranks); }
  PublishedAddress address() const { return address_of(*published_); }
  // Throws Error when its memory cannot be had, or is not what it should be.
  void connect(std::int32_t rank, const PublishedAddress& address);

  // The next message to all others.
  void post(std::string_view message);
  // Until every other has posted as many, or is dead. False: the time was over. Throws Error when one has gone on.
  bool wait(double seconds);
  // Those that live and have not.
  std::vector<std::int32_t> missing() const;
  // After a wait that was not over: what a rank has posted; nothing if it died before.
  const std::optional<std::string>& message(std::int32_t rank) const { return messages_.at(rank); }

  std::int32_t num_ranks() const { return static_cast<std::int32_t>(peers_.size()); }

 private:
  ExchangeWords& words() const { return *published_->at<ExchangeWords>(0); }
  bool arrived(const SharedMemoryPeer& peer) const { return peer.words<ExchangeWords>().posted.load() >= number_; }
  // descriptor: of the memory that it lies in; -1: it is written inline.
  void write(std::string_view message, int descriptor);
  bool wait_for_all(Clock::time_point deadline);
  bool wait_for(const SharedMemoryPeer& peer, Clock::time_point deadline);
  // Whether any was large.
  bool collect();
  static std::optional<std::string> read(const SharedMemoryPeer& peer, const ExchangeMessage& message);

  std::int32_t rank_;
  Clock::duration spin_;
  std::shared_ptr<SharedMemorySegment> published_ = make_published(sizeof(ExchangeWords), ExchangeWords::kMagic);
  std::shared_ptr<SharedMemorySegment> large_;          // the last message, if it is too large
  std::vector<std::optional<SharedMemoryPeer>> peers_;  // by rank; nothing for this one
  std::vector<bool> dead_;                              // by rank, as a wait found
  std::uint64_t number_ = 0;                            // of what this rank wrote last
  bool collected_ = false;
  std::vector<std::optional<std::string>> messages_;  // by rank
};

}  // namespace fastpipe
