#include "shared_memory_link.h"

#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <new>
#include <random>
#include <string>

#include "errors.h"

namespace fastpipe {

namespace {

constexpr std::chrono::microseconds kSpin{4};  // about what a futex costs

int num_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  return ::sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores) : 1;
}

std::uint64_t random_number() {
  std::random_device random;
  return std::uint64_t{random()} << 32 | random();
}

}  // namespace

Clock::duration SharedMemoryLink::usual_spin(std::int32_t num_ranks) {
  return num_ranks < num_cores() ? Clock::duration(kSpin) : Clock::duration::zero();
}

SharedMemoryLink::SharedMemoryLink(std::int32_t rank, std::int32_t num_ranks, Clock::duration spin)
    : rank_(rank),
      nonce_(random_number()),
      spin_(spin),
      board_(SharedMemorySegment::make(sizeof(Board))),
      peers_(num_ranks) {
  Board& board = *board_->at<Board>(0);
  board.magic = kSharedMagic;
  board.nonce = nonce_;
}

BoardAddress SharedMemoryLink::address() const {
  return {::getpid(), board_->descriptor(), nonce_};
}

void SharedMemoryLink::connect(std::int32_t rank, const BoardAddress& address) {
  peers_.at(rank) = std::make_shared<SharedMemoryPeer>(rank, address);
}

const std::shared_ptr<SharedMemoryPeer>& SharedMemoryLink::peer(std::int32_t rank) const {
  if (rank >= 0 && rank < static_cast<std::int32_t>(peers_.size()) && peers_[rank]) return peers_[rank];
  throw ArgumentError("rank " + std::to_string(rank_) + " is not connected to rank " + std::to_string(rank) +
                      " by shared memory; connect every rank of the program first");
}

void SharedMemoryLink::publish(std::size_t program, const SharedMemorySegment& rings, std::uint64_t fingerprint) {
  ProgramNotice& notice = board_->at<Board>(0)->programs[program % kSharedNotices];
  notice.bytes = rings.size();
  notice.fingerprint = fingerprint;
  notice.ready.store(ready_notice(program, rings.descriptor()));
  for (const auto& peer : peers_) {
    if (peer) peer->doorbell().ring_always();
  }
}

}  // namespace fastpipe
