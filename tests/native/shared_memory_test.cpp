// The executor's loop over shared memory with a stub in place of torch: ranks as threads, under the sanitizers, and as
// processes, some of which die.
// Build: g++ -std=c++17 -g -O1 -fsanitize=thread -Icsrc -Itests/native tests/native/shared_memory_test.cpp
// csrc/core/*.cpp Run:   shared_memory_test [number of programs] [first seed]
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/clock.h"
#include "core/errors.h"
#include "core/executor.h"
#include "core/shared_memory_codec.h"
#include "core/shared_memory_link.h"
#include "core/shared_memory_source.h"
#include "random_programs.h"
#include "stub.h"

namespace fastpipe::testing {

namespace {

void expect(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what.c_str());
  std::_Exit(1);
}

std::string text(const std::exception_ptr& error) {
  if (!error) return "";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return known.what();
  }
}

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

class Alarm final : public Observer {
 public:
  explicit Alarm(std::function<void()> tell) : tell_(std::move(tell)) {}
  void starts(std::size_t) noexcept override {}
  void ends(std::size_t) noexcept override {}
  void failed(std::size_t, const std::exception_ptr&) noexcept override { tell_(); }

 private:
  std::function<void()> tell_;
};

// One rank with all that it needs.
class Rank final {
 public:
  Rank(const Shape& shape, const RandomPrograms& programs, std::int32_t rank, std::size_t keep, double timeout)
      : shape_(shape), programs_(programs), keep_(keep), timeout_(timeout), link_(make_link(shape, rank)) {}

  void connect(std::int32_t rank, const BoardAddress& address) { link_->connect(rank, address); }
  BoardAddress address() const { return link_->address(); }

  void build(const Mishap& mishap) {
    const RankProgram program = programs_.program(link_->rank());
    std::vector<ChannelNeeds> needs(programs_.channels().size());
    for (std::int32_t rank = 0; rank < shape_.num_ranks; ++rank) count_needs(programs_.program(rank), needs);
    SharedMemorySource source(link_, std::make_shared<StubCodec>(keep_), needs);
    Stages stages(shape_.num_stages);
    for (std::int32_t index = 0; index < shape_.num_stages; ++index) {
      if (programs_.rank_of(index) != link_->rank()) continue;
      stages[index] = std::make_unique<StubStage>(index, shape_.num_stages, shape_.num_microbatches, mishap);
    }
    executor_ = std::make_unique<Executor>(program, std::move(stages), source.connect(program, timeout_),
                                           [] { return std::make_unique<StubPayload>(); });
    start_.resize(program.size());
    end_.resize(program.size());
  }

  void run(bool announce, const std::function<void()>& tell) {
    Alarm alarm(tell);
    error = nullptr;
    try {
      outcome = executor_->run(7, announce, alarm, start_.data(), end_.data());
      error = executor_->take_error();
    } catch (...) {
      outcome = Outcome::kFailed;
      error = std::current_exception();
    }
  }
  void fail() { executor_->fail(); }

  Outcome outcome = Outcome::kDone;
  std::exception_ptr error;

 private:
  static std::shared_ptr<SharedMemoryLink> make_link(const Shape& shape, std::int32_t rank) {
    const auto spin = std::chrono::microseconds(shape.num_microbatches % 2 == 0 ? 20 : 0);
    return std::make_shared<SharedMemoryLink>(rank, shape.num_ranks, spin);
  }

  Shape shape_;
  const RandomPrograms& programs_;
  std::size_t keep_;
  double timeout_;
  std::shared_ptr<SharedMemoryLink> link_;
  std::unique_ptr<Executor> executor_;
  std::vector<double> start_;
  std::vector<double> end_;
};

Shape random_shape(std::mt19937& random) {
  const auto pick = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  const int ranks = pick(1, 4);
  return {ranks, ranks * pick(1, 2) + pick(0, 1), pick(1, 8)};
}

Mishap random_mishap(const Shape& shape, std::mt19937& random) {
  const auto pick = [&](int below) { return std::uniform_int_distribution<int>(0, below - 1)(random); };
  return {pick(shape.num_stages), pick(shape.num_microbatches), pick(2) == 0, false};
}

// The ranks are threads.
class Threads final {
 public:
  Threads(const Shape& shape, std::uint32_t seed, std::size_t keep, double timeout) : programs_(shape, seed) {
    for (std::int32_t rank = 0; rank < shape.num_ranks; ++rank) {
      ranks_.push_back(std::make_unique<Rank>(shape, programs_, rank, keep, timeout));
    }
    for (std::int32_t rank = 0; rank < shape.num_ranks; ++rank) {
      for (std::int32_t other = 0; other < shape.num_ranks; ++other) {
        if (other != rank) ranks_[rank]->connect(other, ranks_[other]->address());
      }
    }
    for (const auto& rank : ranks_) rank->build(mishap_);
  }

  void step(bool announce, const Mishap& mishap = {}) {
    mishap_ = mishap;
    std::vector<std::thread> threads;
    for (const auto& rank : ranks_) {
      threads.emplace_back([this, &rank, announce] {
        rank->run(announce, [this] {
          for (const auto& other : ranks_) other->fail();
        });
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  void expect_done() const {
    for (const auto& rank : ranks_) {
      expect(rank->outcome == Outcome::kDone, "a good step is done on every rank: " + text(rank->error));
    }
  }

  void expect_failed_at(std::int32_t stage, const std::string& message) const {
    for (std::int32_t rank = 0; rank < static_cast<std::int32_t>(ranks_.size()); ++rank) {
      const bool own = rank == programs_.rank_of(stage);
      expect((ranks_[rank]->outcome == Outcome::kFailed) == own, "the rank of a mishap alone fails");
      const std::string found = text(ranks_[rank]->error);
      expect(!own || found.find(message) != std::string::npos, "with its own error, not " + found);
    }
  }

 private:
  Mishap mishap_;
  RandomPrograms programs_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

void test_random_program(std::uint32_t seed) {
  std::mt19937 random(seed);
  const Shape shape = random_shape(random);
  Threads ranks(shape, seed, seed % 4 == 3 ? 40 : seed % 4, 30);
  const Mishap first = random_mishap(shape, random);
  ranks.step(true, first);
  ranks.expect_failed_at(first.stage, "mishap");
  ranks.step(true);
  ranks.expect_done();
  for (int step = 0; step < 3; ++step) {
    ranks.step(false);
    ranks.expect_done();
    const Mishap mishap = random_mishap(shape, random);
    ranks.step(false, mishap);
    ranks.expect_failed_at(mishap.stage, "mishap");
  }
  ranks.step(false);
  ranks.expect_done();
}

void test_changed_size_is_refused() {
  Threads ranks({2, 2, 3}, 1, 0, 30);
  ranks.step(true);
  ranks.expect_done();
  ranks.step(false, {0, 1, false, true});
  ranks.expect_failed_at(0, "expected 17 numbers, as in the first step with this input, found 18 numbers");
  ranks.step(false);
  ranks.expect_done();
}

// --- processes
// --------------------------------------------------------------------------------------------------------

// Where the forked ranks find each other's boards: a pipe would do, but this is what is tested anyway.
struct Meeting {
  std::atomic<std::int32_t> present;
  BoardAddress addresses[8];
};

void meet(Meeting& meeting, Rank& rank, std::int32_t own, std::int32_t num_ranks) {
  meeting.addresses[own] = rank.address();
  meeting.present.fetch_add(1);
  while (meeting.present.load() < num_ranks) std::this_thread::yield();
  for (std::int32_t other = 0; other < num_ranks; ++other) {
    if (other != own) rank.connect(other, meeting.addresses[other]);
  }
}

// Steps one after the other, with nothing between them to keep the ranks together. The victim dies in the midst of one.
int run_process(Meeting& meeting, const Shape& shape, std::uint32_t seed, std::int32_t own, std::int32_t victim) {
  const RandomPrograms programs(shape, seed);
  Rank rank(shape, programs, own, seed % 3, 20);
  meet(meeting, rank, own, shape.num_ranks);
  const Mishap none;
  rank.build(none);
  const int num_steps = 30;
  for (int step = 0; step < num_steps; ++step) {
    if (own == victim && step == num_steps / 2) {
      std::thread([] { ::kill(::getpid(), SIGKILL); }).detach();
    }
    rank.run(step == 0, [] {});
    if (rank.outcome == Outcome::kDone) continue;
    if (rank.outcome == Outcome::kDrained) return victim == kNone ? 1 : 3;  // by one that had noticed it before
    const std::string found = text(rank.error);
    return victim != kNone && found.find("no transfer with rank") != std::string::npos ? 3 : 1;
  }
  return 0;
}

std::vector<int> run_processes(const Shape& shape, std::uint32_t seed, std::int32_t victim) {
  const auto memory = SharedMemorySegment::make(sizeof(Meeting));
  Meeting& meeting = *memory->at<Meeting>(0);
  std::vector<pid_t> processes;
  for (std::int32_t rank = 0; rank < shape.num_ranks; ++rank) {
    const pid_t process = ::fork();
    if (process == 0) std::_Exit(run_process(meeting, shape, seed, rank, victim));
    processes.push_back(process);
  }
  std::vector<int> codes;
  for (const pid_t process : processes) {
    int status = 0;
    ::waitpid(process, &status, 0);
    codes.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
  }
  return codes;
}

void test_processes(std::uint32_t seed) {
  std::mt19937 random(seed);
  Shape shape = random_shape(random);
  shape.num_ranks = std::max(shape.num_ranks, 2);
  shape.num_stages = std::max(shape.num_stages, shape.num_ranks);
  for (const int code : run_processes(shape, seed, kNone)) expect(code == 0, "processes run step after step");
}

void test_killed_process() {
  const double start = now_seconds();
  const std::vector<int> codes = run_processes({4, 8, 6}, 5, 2);
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
