#include "shared_memory_link.h"

#include <string>

#include "errors.h"

namespace fastpipe {

void SharedMemoryLink::connect(std::int32_t rank, const BoardAddress& address) {
  peers_.at(rank) = std::make_shared<SharedMemoryPeer>(rank, address);
}

const std::shared_ptr<SharedMemoryPeer>& SharedMemoryLink::peer(std::int32_t rank) const {
  if (rank >= 0 && rank < static_cast<std::int32_t>(peers_.size()) && peers_[rank]) return peers_[rank];
  throw ArgumentError("rank " + std::to_string(rank_) + " is not connected to rank " + std::to_string(rank) +
                      " by shared memory; connect every rank of the program first");
}

std::optional<std::pair<std::int32_t, std::int32_t>> SharedMemoryLink::find_let_go() const {
  for (const auto& peer : peers_) {
    const std::uint32_t word = peer ? peer->let_go() : 0;
    if (word != 0) return std::make_pair(peer->rank(), static_cast<std::int32_t>(word) - 1);
  }
  return std::nullopt;
}

void SharedMemoryLink::publish(std::size_t program, const SharedMemorySegment& rings, std::uint64_t fingerprint) {
  ProgramNotice& notice = board_.words().programs[program % kSharedNotices];
  notice.bytes = rings.size();
  notice.fingerprint = fingerprint;
  notice.ready.store(ready_notice(program, rings.descriptor()));
  for (const auto& peer : peers_) {
    if (peer) peer->doorbell().ring_always();
  }
}

void SharedMemoryLink::publish_copies(const SharedMemorySegment& words) {
  ProgramNotice& notice = board_.words().copies;
  notice.bytes = words.size();
  notice.ready.store(ready_notice(0, words.descriptor()));
}

}  // namespace fastpipe
