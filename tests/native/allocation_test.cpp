// A step in which nothing is new allocates no memory: not by action, not by message, not at its ends.
// tests/native/build.py builds it. Run: allocation_test [number of programs] [first seed]
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <random>
#include <string>

#include "harness.h"
#include "loopback_ranks.h"
#include "mixed_ranks.h"
#include "shared_memory_ranks.h"

// Not inlined: beside an inlined free() the compiler takes new and delete for a mismatch.
[[gnu::noinline]] void* operator new(std::size_t size) {
  ++fastpipe::testing::num_allocations;
  if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}

namespace fastpipe::testing {

namespace {

std::int64_t allocated(const Ranks& ranks) {
  std::int64_t sum = 0;
  for (std::int32_t rank = 0; rank < ranks.shape().num_ranks; ++rank) sum += ranks[rank].allocations();
  return sum;
}

// Pairs go either way until enough of them were measured; what each way needs it has after its first time.
void expect_no_allocation(Ranks& ranks, const std::string& transport) {
  ranks.good_step(true);
  expect(allocated(ranks) > 0, "the first step learns what the messages look like, so the count counts");
  for (int step = 0; step < 20; ++step) ranks.good_step(false);
  for (int step = 0; step < 5; ++step) {
    ranks.good_step(false);
    expect(allocated(ranks) == 0, std::to_string(allocated(ranks)) + " allocations in a step over " + transport);
  }
}

void test_random_program(std::uint32_t seed) {
  std::mt19937 random(seed);
  const Shape shape = random_shape(random);
  Ranks loopback = ranks_over_loopback(shape, seed, 0);
  expect_no_allocation(loopback, "loopback");
  Ranks shared_memory = ranks_over_shared_memory(shape, seed, 0);
  expect_no_allocation(shared_memory, "shared memory");
  Hosts hosts;
  for (std::int32_t rank = 0; rank < shape.num_ranks; ++rank) hosts.push_back(rank / 2);
  Ranks mixed = ranks_on_hosts(shape, seed, hosts, 0);
  expect_no_allocation(mixed, "both");
}

}  // namespace

}  // namespace fastpipe::testing

int main(int argc, char** argv) {
  const int count = argc > 1 ? std::atoi(argv[1]) : 100;
  const int first = argc > 2 ? std::atoi(argv[2]) : 0;
  // Of each 26 steps over each of three transports.
  for (int seed = first; seed < first + count / 3; ++seed) {
    fastpipe::testing::test_random_program(static_cast<std::uint32_t>(seed));
  }
  std::printf("%d programs: ok\n", count);
  return 0;
}
