// What the ranks of a host tell each other between steps: everybody posts a message, and waits for all others'.
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

// What a rank says to all others, of two exchanges: that of an odd number and that of an even one.
constexpr std::size_t kExchangeText = 16384;

struct ExchangeNote {
  std::uint64_t bytes;
  std::int32_t descriptor;  // of the memory that it lies in; -1: in `text`
  alignas(kSharedLine) std::byte text[kExchangeText];
};

struct ExchangeBoard {
  static constexpr std::uint64_t kMagic = 0x3178657069707466;

  std::uint64_t magic;
  std::uint64_t nonce;
  DoorbellWords doorbell;
  alignas(kSharedLine) SharedNumber posted;  // notes ever written; written last
  alignas(kSharedLine) ExchangeNote notes[2];
};

// Every rank has a board, on which it alone writes and which all others read. Two notes are enough: a rank posts n + 1
// when it has read everybody's n, so its n - 1, whose place that is, has been read by everybody who has posted n.
// Should a rank have gone on without the others (its user broke off a wait), that is seen by its number, and refused.
//
// What has no place on the board lies in memory of its own, which goes with its process. So where there was such a
// message everybody, having read it, posts once more, and waits: nobody ends, or lets go of it, before that. (A board
// stays, for those who have mapped it.)
//
// Who waits sleeps for the first rank that is missing, and is woken by that one alone.
class SharedMemoryExchange final {
 public:
  // spin: how long to look before sleeping.
  SharedMemoryExchange(std::int32_t rank, std::int32_t num_ranks, Clock::duration spin)
      : rank_(rank), spin_(spin), peers_(num_ranks) {}
  SharedMemoryExchange(std::int32_t rank, std::int32_t num_ranks)
      : SharedMemoryExchange(rank, num_ranks, usual_spin(num_ranks)) {}

  // How many ranks compute on this host, this exchange's or not: only where a core is free it pays to look.
  void share_host(std::int32_t num_ranks) { spin_ = usual_spin(num_ranks); }
  BoardAddress address() const { return board_.address(); }
  // Throws Error when its memory cannot be had, or is not what it should be.
  void connect(std::int32_t rank, const BoardAddress& address);

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
  struct Peer {
    SharedMemoryProcess process;
    SharedMemoryBoard<ExchangeBoard> board;
    bool dead = false;
  };

  bool arrived(const Peer& peer) const { return peer.board.words().posted.load() >= number_; }
  // descriptor: of the memory that it lies in; -1: it goes on the board.
  void write(std::string_view message, int descriptor);
  bool wait_for_all(Clock::time_point deadline);
  bool wait_for(Peer& peer, Clock::time_point deadline);
  bool spin(const Peer& peer) const;
  // Whether any was large.
  bool collect();
  static std::optional<std::string> read(const Peer& peer, const ExchangeNote& note);

  std::int32_t rank_;
  Clock::duration spin_;
  SharedMemoryBoard<ExchangeBoard> board_;
  std::shared_ptr<SharedMemorySegment> large_;  // the last message, if it has no place on the board
  std::vector<std::optional<Peer>> peers_;      // by rank; nothing for this one
  std::uint64_t number_ = 0;                    // of what this rank wrote last
  bool collected_ = false;
  std::vector<std::optional<std::string>> messages_;  // by rank
};

}  // namespace fastpipe
