#include "shared_memory_peer.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "errors.h"

namespace fastpipe {

namespace {

SharedMemoryDescriptor watch(pid_t process) {
  const auto number = static_cast<int>(::syscall(SYS_pidfd_open, process, 0));
  if (number >= 0) return SharedMemoryDescriptor(number);
  throw Error("shared memory: process " + std::to_string(process) + " cannot be watched (" + std::strerror(errno) +
              "); use transport='process_group'");
}

}  // namespace

SharedMemoryPeer::SharedMemoryPeer(std::int32_t rank, const BoardAddress& address)
    : rank_(rank), process_(address.process), watch_(watch(address.process)) {
  board_ = open(address.descriptor, sizeof(Board));
  if (board().magic == kSharedMagic && board().nonce == address.nonce) return;
  throw Error("shared memory: what rank " + std::to_string(rank) +
              " gave is not its board; run the same version of fastpipe on every rank");
}

bool SharedMemoryPeer::alive() const {
  pollfd descriptor{watch_.number(), POLLIN, 0};
  return ::poll(&descriptor, 1, 0) <= 0;
}

std::shared_ptr<SharedMemorySegment> SharedMemoryPeer::open(int descriptor, std::size_t bytes) const {
  auto segment = SharedMemorySegment::open(process_, descriptor, bytes);
  // The number may have been another process's by then, but not if the one that is watched lives still.
  if (alive()) return segment;
  throw Error("shared memory: the process of rank " + std::to_string(rank_) + " died");
}

std::shared_ptr<SharedMemorySegment> SharedMemoryPeer::rings(std::size_t program, std::uint64_t fingerprint) const {
  ProgramNotice& notice = board().programs[program % kSharedNotices];
  const std::uint64_t ready = notice.ready.load();
  const auto descriptor = static_cast<int>(ready & 0xffffffff);
  if (ready != ready_notice(program, descriptor)) return nullptr;
  if (notice.fingerprint != fingerprint) {
    throw Error("shared memory: rank " + std::to_string(rank_) +
                " runs another program; call step and eval_step in the same order on every rank");
  }
  return open(descriptor, notice.bytes);
}

}  // namespace fastpipe
