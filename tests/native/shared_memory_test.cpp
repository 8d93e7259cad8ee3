// The executor's loop over shared memory with a stub in place of torch: ranks as threads, under the sanitizers, and as
// processes, some of which die.
// Run: programs shared_memory_test [number of programs] [first seed]
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <random>

#include "core/common.h"
#include "harness.h"
#include "process_ranks.h"
#include "shared_memory_ranks.h"

namespace fastpipe::testing::shared_memory_test {

namespace {

void test_random_program(std::uint32_t seed) {
  std::mt19937 random(seed);
  const Shape shape = random_shape(random);
  Ranks ranks = ranks_over_shared_memory(shape, seed, seed % 4 == 3 ? 40 : seed % 4);
  fail_and_recover(ranks, random);
}

void test_changed_size_is_refused() {
  Ranks ranks = ranks_over_shared_memory({2, 2, 3}, 1, 0);
  change_size(ranks);
}

// --- processes ---------------------------------------------------------------------------------------------------

const ProcessRanks kProcesses(30, [](const Link& link, const RandomPrograms& programs, const RankProgram& program,
                                     std::uint32_t seed) { return connect(link, programs, program, seed % 3); });

void test_foreign_memory_is_refused() {
  const auto memory = SharedMemorySegment::make(4096);
  try {
    SharedMemorySegment::open(::getpid(), memory->descriptor(), 8192);
    expect(false, "another size is refused");
  } catch (const Error&) {
  }
  int pipes[2];
  expect(::pipe(pipes) == 0, "a pipe");
  try {
    SharedMemorySegment::open(::getpid(), pipes[0], 4096);
    expect(false, "what is no sealed memory is refused");
  } catch (const Error&) {
  }
}

}  // namespace

int run(int argc, char** argv) {
  const int count = argc > 1 ? std::atoi(argv[1]) : 100;
  const int first = argc > 2 ? std::atoi(argv[2]) : 0;
  test_foreign_memory_is_refused();
  // Before any thread, since a sanitizer cannot follow a process forked beside them.
  for (int seed = first; seed < first + count / 4; ++seed) kProcesses.test_steps(static_cast<std::uint32_t>(seed));
  kProcesses.test_killed();
  test_changed_size_is_refused();
  for (int seed = first; seed < first + count; ++seed) test_random_program(static_cast<std::uint32_t>(seed));
  std::printf("%d programs: ok\n", count);
  return 0;
}

}  // namespace fastpipe::testing::shared_memory_test
