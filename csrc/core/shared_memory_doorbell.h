// How a rank sleeps until another process has done something for it.
#pragma once

#include <cstdint>

#include "shared_memory_layout.h"

namespace fastpipe {

// How long a rank sleeps before it looks whether the one that it waits for still lives.
constexpr int kSliceMilliseconds = 50;

// What a rank sleeps for.
constexpr std::uint32_t kNoSleeper = 0;
constexpr std::uint32_t kForSpace = 1;  // a cell, or a place in a ring
constexpr std::uint32_t for_channel(std::int32_t channel) {
  return static_cast<std::uint32_t>(channel) + 2;
}
// On a board that knows no channels.
constexpr std::uint32_t for_rank(std::int32_t rank) {
  return static_cast<std::uint32_t>(rank) + 1;
}

// No wake-up is lost. The owner  (1) reads `rings`, (2) writes `sleeper`, (3) looks at what it waits for, and
// (4) sleeps if `rings` is still what it was. Whoever changes what the owner may wait for  (a) changes it,
// (b) reads `sleeper`, and, if it is set, (c) unsets it, (d) changes `rings`, (e) wakes. (2), (3), (a) and (b) are
// sequentially consistent, so that they have one order for all: if (b) does not see (2), then (3), which follows (2),
// sees (a), and the owner does not sleep. If (b) sees (2), then (d) comes after (1), so that the owner does not fall
// asleep at (4), or sleeps already and is woken by (e). Two who ring at once do not harm: one does (d) and (e), and
// both have done (a) before. Who dies between (c) and (e) leaves the owner asleep, but not for longer than its
// slice: every sleep is bounded, and the owner looks again.
class SharedMemoryDoorbell final {
 public:
  explicit SharedMemoryDoorbell(DoorbellWords& words) : words_(words) {}

  // By others, after the change, which must have been a sequentially consistent store. Makes no system call unless the
  // owner sleeps for this.
  void ring(std::uint32_t reason) const;
  // The same whatever the owner sleeps for.
  void ring_always() const;

  // By the owner: steps 1 and 2, ...
  std::uint32_t lie_down(std::uint32_t reason) const;
  // ... and after a look either 4 (false: the time was over), ...
  bool sleep(std::uint32_t rings, int milliseconds) const;
  // ... or not.
  void get_up() const { words_.sleeper.store(kNoSleeper, std::memory_order_relaxed); }

 private:
  void wake() const;

  DoorbellWords& words_;
};

}  // namespace fastpipe
