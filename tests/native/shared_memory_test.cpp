// The executor's loop over shared memory with a stub in place of torch: ranks as threads, under the sanitizers, and as
// processes, some of which die.
// tests/native/build.py builds it. Run: shared_memory_test [number of programs] [first seed]
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/clock.h"
#include "core/errors.h"
#include "core/shared_memory_codec.h"
#include "core/shared_memory_link.h"
#include "core/shared_memory_source.h"
#include "harness.h"
#include "processes.h"

namespace fastpipe::testing {

namespace {

// Numbers, copied out. Some leases are kept for a while, as a stage keeps a tensor.
class StubCodec final : public SharedMemoryCodec {
 public:
  explicit StubCodec(std::size_t keep) : kept_(keep) {}

  std::size_t size(const Payload& payload, bool) const override {
    return 8 * (1 + static_cast<const StubPayload&>(payload).numbers.size());
  }
  void write(const Payload& payload, const CellBytes& to) const override {
    const auto& numbers = static_cast<const StubPayload&>(payload).numbers;
    const auto count = static_cast<std::int64_t>(numbers.size());
    std::memcpy(to.data, &count, 8);
    std::memcpy(to.data + 8, numbers.data(), 8 * numbers.size());
  }
  std::unique_ptr<Spec> read_spec(const CellBytes& from) const override {
    std::int64_t count = 0;
    std::memcpy(&count, from.data, 8);
    return std::make_unique<StubSpec>(static_cast<std::size_t>(count));
  }
  void adopt(Payload& into, const Spec& spec, const CellBytes& from,
             const std::shared_ptr<SharedMemoryLease>& lease) const override {
    const std::size_t count = static_cast<const StubSpec&>(spec).size;
    if (from.size != 8 * (1 + count)) throw Error("a message of the wrong size");
    auto& numbers = static_cast<StubPayload&>(into).numbers;
    numbers.resize(count);
    std::memcpy(numbers.data(), from.data + 8, 8 * count);
    std::memset(from.data, 0xff, from.size);  // who reads it again, or did not own it, is found out
    if (!kept_.empty()) kept_[next_++ % kept_.size()] = lease;
  }

 private:
  mutable std::vector<std::shared_ptr<SharedMemoryLease>> kept_;
  mutable std::size_t next_ = 0;
};

using Link = std::shared_ptr<SharedMemoryLink>;

Link make_link(const Shape& shape, std::int32_t rank) {
  const auto spin = std::chrono::microseconds(shape.num_microbatches % 2 == 0 ? 20 : 0);
  return std::make_shared<SharedMemoryLink>(rank, shape.num_ranks, spin);
}

// keep: how many messages' memory a rank holds on to.
std::unique_ptr<Transport> connect(const Link& link, const RandomPrograms& programs, const RankProgram& program,
                                   std::size_t keep) {
  std::vector<ChannelNeeds> needs(programs.channels().size());
  for (std::int32_t rank = 0; rank < programs.shape().num_ranks; ++rank) count_needs(programs.program(rank), needs);
  return SharedMemorySource(link, std::make_shared<StubCodec>(keep), needs).connect(program, 20);
}

Ranks ranks_over_shared_memory(const Shape& shape, std::uint32_t seed, std::size_t keep) {
  const RandomPrograms programs(shape, seed);
  std::vector<Link> links;
  for (std::int32_t rank = 0; rank < shape.num_ranks; ++rank) links.push_back(make_link(shape, rank));
  for (const Link& link : links) {
    for (const Link& other : links) {
      if (other != link) link->connect(other->rank(), other->address());
    }
  }
  return {programs,
          [&](const RankProgram& program) { return connect(links[program.rank()], programs, program, keep); }};
}

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
