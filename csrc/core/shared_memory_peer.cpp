#include "shared_memory_peer.h"

#include <string>

#include "errors.h"

namespace fastpipe {

SharedMemoryPeer::SharedMemoryPeer(std::int32_t rank, const BoardAddress& address)
    : process_(rank, address.process), board_(process_, address) {}

std::shared_ptr<SharedMemorySegment> SharedMemoryPeer::rings(std::size_t program, std::uint64_t fingerprint) const {
  const ProgramNotice& notice = board_.words().programs[program % kSharedNotices];
  const std::uint64_t ready = notice.ready.load();
  const auto descriptor = static_cast<int>(ready & 0xffffffff);
  if (ready != ready_notice(program, descriptor)) return nullptr;
  if (notice.fingerprint != fingerprint) {
    throw Error("shared memory: rank " + std::to_string(rank()) +
                " runs another program; call step and eval_step in the same order on every rank");
  }
  return open(descriptor, notice.bytes);
}

std::shared_ptr<SharedMemorySegment> SharedMemoryPeer::copies() const {
  const ProgramNotice& notice = board_.words().copies;
  const std::uint64_t ready = notice.ready.load();
  return ready == 0 ? nullptr : open(static_cast<int>(ready & 0xffffffff), notice.bytes);
}

}  // namespace fastpipe
