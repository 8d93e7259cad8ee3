// The executor's loop over loopback with a stub in place of torch, for the thread and address sanitizers.
// Run: programs core_stub_test [number of programs] [first seed]
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>

#include "core/common.h"
#include "harness.h"
#include "loopback_ranks.h"

namespace fastpipe::testing::core_stub_test {

namespace {

void test_random_program(std::uint32_t seed) {
  std::mt19937 random(seed);
  const Shape shape = random_shape(random);
  Ranks ranks = ranks_over_loopback(shape, seed, seed % 3 == 0 ? 0.0005 : 0);
  fail_and_recover(ranks, random);
}

void test_changed_size_is_refused() {
  Ranks ranks = ranks_over_loopback({2, 2, 3}, 1, 0);
  change_size(ranks);
}

void test_each_backward_runs_once() {
  Ranks ranks = ranks_over_loopback({2, 2, 3}, 1, 0);
  ranks.good_step(true);
  for (const std::size_t rank : {0, 1}) ranks[rank].expect_backwards(3);
}

void test_unknown_signature_is_refused() {
  Ranks ranks = ranks_over_loopback({2, 2, 3}, 1, 0);
  ranks.step(false);
  expect(ranks[0].error().find("announce=True") != std::string::npos, "a signature must be announced");
}

void test_silent_peer() {
  Ranks ranks = ranks_over_loopback({3, 3, 80}, 1, 0, 1);  // 80 seconds, if it were waited for every message
  const double start = now_seconds();
  ranks.step(true, {}, 1);
  expect(now_seconds() - start < kFarBelowPatience, "a silent peer is given up once, not once a message");
  for (const std::size_t rank : {0, 2}) {
    expect(ranks[rank].error().find("no transfer with rank 1") != std::string::npos, "it is named");
  }
  ranks.step(true, {}, 1);
  expect(ranks[0].error().find("build the Pipeline again") != std::string::npos, "the transport stays broken");
}

}  // namespace

int run(int argc, char** argv) {
  const int count = argc > 1 ? std::atoi(argv[1]) : 100;
  const int first = argc > 2 ? std::atoi(argv[2]) : 0;
  test_changed_size_is_refused();
  test_each_backward_runs_once();
  test_unknown_signature_is_refused();
  test_silent_peer();
  for (int seed = first; seed < first + count; ++seed) test_random_program(static_cast<std::uint32_t>(seed));
  std::printf("%d programs: ok\n", count);
  return 0;
}

}  // namespace fastpipe::testing::core_stub_test
