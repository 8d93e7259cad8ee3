#include "shared_memory_doorbell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>

namespace fastpipe {

namespace {

// Not the PRIVATE kind, which knows one process alone.
long futex(SharedWord& word, int operation, std::uint32_t value, const timespec* timeout) {
  return ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

}  // namespace

void SharedMemoryDoorbell::ring(std::uint32_t reason) const {
  if (words_.sleeper.load() == reason) wake();
}

void SharedMemoryDoorbell::ring_always() const {
  if (words_.sleeper.load() != kNoSleeper) wake();
}

void SharedMemoryDoorbell::wake() const {
  if (words_.sleeper.exchange(kNoSleeper) == kNoSleeper) return;
  words_.rings.fetch_add(1);
  futex(words_.rings, FUTEX_WAKE, 1, nullptr);
}

std::uint32_t SharedMemoryDoorbell::lie_down(std::uint32_t reason) const {
  const std::uint32_t rings = words_.rings.load();
  words_.sleeper.store(reason);
  return rings;
}

bool SharedMemoryDoorbell::sleep(std::uint32_t rings, int milliseconds) const {
  const timespec slice{milliseconds / 1000, milliseconds % 1000 * 1000000L};
  const bool woken = futex(words_.rings, FUTEX_WAIT, rings, &slice) == 0 || errno != ETIMEDOUT;
  get_up();
  return woken;
}

}  // namespace fastpipe
