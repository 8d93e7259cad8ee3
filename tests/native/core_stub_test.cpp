// The executor's loop and the loopback transport with a stub in place of torch, for the thread and address sanitizers.
// Build: g++ -std=c++17 -g -O1 -fsanitize=thread -Icsrc -Itests/native tests/native/core_stub_test.cpp csrc/core/*.cpp
// Run:   core_stub_test [number of programs] [first seed]
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/clock.h"
#include "core/errors.h"
#include "core/executor.h"
#include "core/loopback_hub.h"
#include "random_programs.h"
#include "stub.h"

namespace fastpipe::testing {

namespace {

void expect(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what.c_str());
  std::exit(1);
}

std::string text(const std::exception_ptr& error) {
  if (!error) return "";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return known.what();
  }
}

// All ranks of a program, each a thread in every step.
class Ranks final {
 public:
  Ranks(Shape shape, std::uint32_t seed, double delay, double timeout)
      : shape_(shape), programs_(shape, seed), results_(shape.num_ranks) {
    std::vector<std::int32_t> lanes(programs_.channels().size());
    for (std::size_t i = 0; i < lanes.size(); ++i) lanes[i] = static_cast<std::int32_t>(i);
    hub_ = std::make_shared<LoopbackHub>(programs_.channels(), lanes, delay);
    for (std::int32_t rank = 0; rank < shape.num_ranks; ++rank) add(rank, timeout);
  }

  void step(bool announce, const Mishap& mishap = {}, std::int32_t absent = kNone) {
    mishap_ = mishap;
    std::vector<std::thread> threads;
    for (std::int32_t rank = 0; rank < shape_.num_ranks; ++rank) {
      if (rank != absent) threads.emplace_back([this, rank, announce] { run(rank, announce); });
    }
    for (std::thread& thread : threads) thread.join();
  }

  void expect_done() const {
    for (const Result& result : results_) {
      expect(result.outcome == Outcome::kDone, "a good step is done on every rank: " + text(result.error));
      for (std::size_t i = 0; i < result.start.size(); ++i) {
        expect(0 < result.start[i] && result.start[i] <= result.end[i], "a span ends after it starts");
      }
    }
  }

  void expect_failed_at(std::int32_t stage, const std::string& message) const {
    const std::int32_t rank = programs_.rank_of(stage);
    for (std::int32_t other = 0; other < shape_.num_ranks; ++other) {
      const Result& result = results_[other];
      if (other == rank) {
        expect(result.outcome == Outcome::kFailed, "the rank of a mishap fails");
        expect(text(result.error).find(message) != std::string::npos, "with its own error, not " + text(result.error));
      } else {
        expect(result.outcome != Outcome::kFailed, "no other rank fails: " + text(result.error));
      }
    }
  }

  void expect_backwards(std::int64_t each) const {
    for (const StubStage* stage : stages_) expect(stage->num_backwards() == each, "each backward ran once");
  }

  const std::string& error_text(std::int32_t rank) const { return results_[rank].text; }

 private:
  struct Result {
    Outcome outcome = Outcome::kDone;
    std::exception_ptr error;
    std::string text;
    std::vector<double> start;
    std::vector<double> end;
  };

  // Tells the other ranks of a failure, as the control plane does.
  class Alarm final : public Observer {
   public:
    Alarm(Ranks& ranks, std::int32_t rank) : ranks_(ranks), rank_(rank) {}
    void starts(std::size_t) noexcept override {}
    void ends(std::size_t) noexcept override {}
    void failed(std::size_t, const std::exception_ptr&) noexcept override {
      for (std::int32_t other = 0; other < ranks_.shape_.num_ranks; ++other) {
        if (other != rank_) ranks_.executors_[other]->fail();
      }
    }

   private:
    Ranks& ranks_;
    std::int32_t rank_;
  };

  void add(std::int32_t rank, double timeout) {
    Stages stages(shape_.num_stages);
    for (std::int32_t index = 0; index < shape_.num_stages; ++index) {
      if (programs_.rank_of(index) != rank) continue;
      auto stage = std::make_unique<StubStage>(index, shape_.num_stages, shape_.num_microbatches, mishap_);
      stages_.push_back(stage.get());
      stages[index] = std::move(stage);
    }
    const RankProgram program = programs_.program(rank);
    results_[rank].start.resize(program.size());
    results_[rank].end.resize(program.size());
    executors_.push_back(std::make_unique<Executor>(program, std::move(stages), hub_->connect(program, timeout),
                                                    [] { return std::make_unique<StubPayload>(); }));
  }

  void run(std::int32_t rank, bool announce) {
    Result& result = results_[rank];
    Alarm alarm(*this, rank);
    Executor& executor = *executors_[rank];
    try {
      result.outcome = executor.run(7, announce, alarm, result.start.data(), result.end.data());
      result.error = executor.take_error();
    } catch (...) {
      result.outcome = Outcome::kFailed;
      result.error = std::current_exception();
    }
    result.text = text(result.error);
  }

  Shape shape_;
  RandomPrograms programs_;
  Mishap mishap_;
  std::shared_ptr<LoopbackHub> hub_;
  std::vector<StubStage*> stages_;
  std::vector<std::unique_ptr<Executor>> executors_;
  std::vector<Result> results_;
};

Shape random_shape(std::mt19937& random) {
  const auto pick = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  const int ranks = pick(1, 4);
  return {ranks, ranks * pick(1, 2) + pick(0, 1), pick(1, 6)};
}

Mishap random_mishap(const Shape& shape, std::mt19937& random) {
  const auto pick = [&](int below) { return std::uniform_int_distribution<int>(0, below - 1)(random); };
  return {pick(shape.num_stages), pick(shape.num_microbatches), pick(2) == 0, false};
}

void test_random_program(std::uint32_t seed) {
  std::mt19937 random(seed);
  const Shape shape = random_shape(random);
  const double delay = seed % 3 == 0 ? 0.0005 : 0;
  Ranks ranks(shape, seed, delay, 30);
  // A failure before anything is known, good steps, a failure when all is known, and a good step again.
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
  Ranks ranks({2, 2, 3}, 1, 0, 30);
  ranks.step(true);
  ranks.expect_done();
  ranks.expect_backwards(3);
  ranks.step(false, {0, 1, false, true});
  ranks.expect_failed_at(0, "expected 17 numbers, as in the first step with this input, found 18 numbers");
  ranks.step(false);
  ranks.expect_done();
}

void test_unknown_signature_is_refused() {
  Ranks ranks({2, 2, 3}, 1, 0, 30);
  ranks.step(false);
  expect(ranks.error_text(0).find("announce=True") != std::string::npos, "a signature must be announced");
}

void test_silent_peer() {
  Ranks ranks({3, 3, 2}, 1, 0, 0.2);
  const double start = now_seconds();
  ranks.step(true, {}, 1);
  expect(now_seconds() - start < 3, "a silent peer is given up once, not once a message");
  for (const std::int32_t rank : {0, 2}) {
    expect(ranks.error_text(rank).find("no transfer with rank 1") != std::string::npos, "it is named");
  }
  ranks.step(true, {}, 1);
  expect(ranks.error_text(0).find("build the Pipeline again") != std::string::npos, "the transport stays broken");
}

}  // namespace

}  // namespace fastpipe::testing

int main(int argc, char** argv) {
  using namespace fastpipe::testing;
  const int count = argc > 1 ? std::atoi(argv[1]) : 100;
  const int first = argc > 2 ? std::atoi(argv[2]) : 0;
  test_changed_size_is_refused();
  test_unknown_signature_is_refused();
  test_silent_peer();
  for (int seed = first; seed < first + count; ++seed) test_random_program(static_cast<std::uint32_t>(seed));
  std::printf("%d programs: ok\n", count);
  return 0;
}
