// Ranks of random programs as processes, some of which die: what a transport over shared memory or above it must bear.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/common.h"
#include "harness.h"
#include "processes.h"
#include "shared_memory_ranks.h"

namespace fastpipe::testing {

class ProcessRanks {
 public:
  // Connects the program of a rank whose link has met all others.
  using Connect = std::function<std::unique_ptr<Transport>(const Link&, const RandomPrograms&, const RankProgram&,
                                                           std::uint32_t seed)>;

  ProcessRanks(int num_steps, Connect connect) : num_steps_(num_steps), connect_(std::move(connect)) {}

  void test_steps(std::uint32_t seed) const {
    std::mt19937 random(seed);
    Shape shape = random_shape(random);
    shape.num_ranks = std::max(shape.num_ranks, 2);
    shape.num_stages = std::max(shape.num_stages, shape.num_ranks);
    for (const int code : run_all(shape, seed, kNone)) expect(code == 0, "processes run step after step");
  }

  void test_killed() const {
    const double start = now_seconds();
    const std::vector<int> codes = run_all({4, 8, 6}, 5, 2);
    expect(codes[2] == -SIGKILL || codes[2] == 0, "the victim dies");
    for (const int rank : {0, 1, 3}) {
      expect(codes[rank] == 3 || codes[rank] == 0, "the others name who is gone, not " + std::to_string(codes[rank]));
    }
    expect(now_seconds() - start < kFarBelowPatience, "soon");
  }

 private:
  std::vector<int> run_all(const Shape& shape, std::uint32_t seed, std::int32_t victim) const {
    return run_processes(shape.num_ranks,
                         [&](Meeting& meeting, std::int32_t rank) { return run(meeting, shape, seed, rank, victim); });
  }

  // What a rank has sent lies in its memory until it is taken: so nobody ends before all have made their steps, as
  // pipelines see to by their exchanges. One that a victim leaves alone would wait for ever.
  int run(Meeting& meeting, const Shape& shape, std::uint32_t seed, std::int32_t own, std::int32_t victim) const {
    const RandomPrograms programs(shape, seed);
    const Link link = make_link(shape, own);
    meet(meeting, *link, own, shape.num_ranks);
    const Mishap none;
    Rank rank(programs, own, none, [&](const RankProgram& program) { return connect_(link, programs, program, seed); });
    const int code = take_steps(rank, own, victim);
    meeting.present.fetch_add(1);
    while (victim == kNone && meeting.present.load() < 2 * shape.num_ranks) std::this_thread::yield();
    return code;
  }

  // One after the other, with nothing between them to keep the ranks together. The victim dies in the midst of one.
  int take_steps(Rank& rank, std::int32_t own, std::int32_t victim) const {
    for (int step = 0; step < num_steps_; ++step) {
      if (own == victim && step == num_steps_ / 2) {
        std::thread([] { ::kill(::getpid(), SIGKILL); }).detach();
      }
      rank.run(step == 0, [] {});
      if (rank.outcome() == Outcome::kDone) continue;
      if (rank.outcome() == Outcome::kDrained) return victim == kNone ? 1 : 3;  // by one that had noticed it before
      return victim != kNone && rank.error().find("no transfer with rank") != std::string::npos ? 3 : 1;
    }
    return 0;
  }

  int num_steps_;
  Connect connect_;
};

}  // namespace fastpipe::testing
