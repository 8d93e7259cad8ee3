// The executor's loop over shared memory with a stub in place of torch: ranks as threads, under the sanitizers, and as
// processes, some of which die.
// tests/native/build.py builds it. Run: shared_memory_test [number of programs] [first seed]
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/clock.h"
#include "core/errors.h"
#include "harness.h"
#include "processes.h"
#include "shared_memory_ranks.h"

namespace fastpipe::testing {

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

// Steps one after the other, with nothing between them to keep the ranks together. The victim dies in the midst of one.
int run_process(Meeting& meeting, const Shape& shape, std::uint32_t seed, std::int32_t own, std::int32_t victim) {
  const RandomPrograms programs(shape, seed);
  const Link link = make_link(shape, own);
  meet(meeting, *link, own, shape.num_ranks);
  const Mishap none;
  Rank rank(programs, own, none,
            [&](const RankProgram& program) { return connect(link, programs, program, seed % 3); });
  const int num_steps = 30;
  for (int step = 0; step < num_steps; ++step) {
    if (own == victim && step == num_steps / 2) {
      std::thread([] { ::kill(::getpid(), SIGKILL); }).detach();
    }
    rank.run(step == 0, [] {});
    if (rank.outcome() == Outcome::kDone) continue;
    if (rank.outcome() == Outcome::kDrained) return victim == kNone ? 1 : 3;  // by one that had noticed it before
    return victim != kNone && rank.error().find("no transfer with rank") != std::string::npos ? 3 : 1;
  }
  return 0;
}

std::vector<int> run_all(const Shape& shape, std::uint32_t seed, std::int32_t victim) {
  return run_processes(shape.num_ranks, [&](Meeting& meeting, std::int32_t rank) {
    return run_process(meeting, shape, seed, rank, victim);
  });
}

void test_processes(std::uint32_t seed) {
  std::mt19937 random(seed);
  Shape shape = random_shape(random);
  shape.num_ranks = std::max(shape.num_ranks, 2);
  shape.num_stages = std::max(shape.num_stages, shape.num_ranks);
  for (const int code : run_all(shape, seed, kNone)) expect(code == 0, "processes run step after step");
}

void test_killed_process() {
  const double start = now_seconds();
  const std::vector<int> codes = run_all({4, 8, 6}, 5, 2);
  expect(codes[2] == -SIGKILL || codes[2] == 0, "the victim dies");
  for (const int rank : {0, 1, 3}) {
    expect(codes[rank] == 3 || codes[rank] == 0, "the others name who is gone, not " + std::to_string(codes[rank]));
  }
  expect(now_seconds() - start < 5, "soon");
}

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

}  // namespace fastpipe::testing

int main(int argc, char** argv) {
  using namespace fastpipe::testing;
  const int count = argc > 1 ? std::atoi(argv[1]) : 100;
  const int first = argc > 2 ? std::atoi(argv[2]) : 0;
  test_foreign_memory_is_refused();
  // Before any thread, since a sanitizer cannot follow a process forked beside them.
  for (int seed = first; seed < first + count / 4; ++seed) test_processes(static_cast<std::uint32_t>(seed));
  test_killed_process();
  test_changed_size_is_refused();
  for (int seed = first; seed < first + count; ++seed) test_random_program(static_cast<std::uint32_t>(seed));
  std::printf("%d programs: ok\n", count);
  return 0;
}
