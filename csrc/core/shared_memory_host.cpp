#include "shared_memory_host.h"

#include <sched.h>

#include <chrono>
#include <random>

namespace fastpipe {

namespace {

constexpr std::chrono::microseconds kSpin{4};  // about what a futex costs

int num_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  return ::sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores) : 1;
}

}  // namespace

Clock::duration usual_spin(std::int32_t num_ranks) {
  return num_ranks < num_cores() ? Clock::duration(kSpin) : Clock::duration::zero();
}

std::uint64_t random_nonce() {
  std::random_device random;
  return std::uint64_t{random()} << 32 | random();
}

}  // namespace fastpipe
