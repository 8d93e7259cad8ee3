// What the ranks of a host go by when they wait for each other.
#pragma once

#include <cstdint>

#include "clock.h"

namespace fastpipe {

// How long to look before sleeping: a few microseconds; zero with as many ranks as cores, as who looks would keep a
// core from the one that it waits for.
Clock::duration usual_spin(std::int32_t num_ranks);

// So that nothing else is taken for a rank's memory.
std::uint64_t random_nonce();

// Between two looks.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace fastpipe
