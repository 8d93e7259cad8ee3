#include "shared_memory_process.h"

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

SharedMemoryProcess::SharedMemoryProcess(std::int32_t rank, pid_t process)
    : rank_(rank), process_(process), watch_(watch(process)) {}

bool SharedMemoryProcess::alive() const {
  pollfd descriptor{watch_.number(), POLLIN, 0};
  return ::poll(&descriptor, 1, 0) <= 0;
}

std::shared_ptr<SharedMemorySegment> SharedMemoryProcess::open(int descriptor, std::size_t bytes) const {
  auto segment = SharedMemorySegment::open(process_, descriptor, bytes);
  // The number may have been another process's by then, but not if the one that is watched lives still.
  if (alive()) return segment;
  throw Error("shared memory: the process of rank " + std::to_string(rank_) + " died");
}

}  // namespace fastpipe
