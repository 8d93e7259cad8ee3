// The executor's loop on random programs with a stub in place of torch, over any transport, ranks as threads.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/executor.h"
#include "random_programs.h"
#include "stub.h"

namespace fastpipe::testing {

// Of this thread, where a test counts them; see allocation_test.cpp.
inline thread_local std::int64_t num_allocations = 0;

inline void expect(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what.c_str());
  std::_Exit(1);  // other threads may be running
}

inline std::string text(const std::exception_ptr& error) {
  if (!error) return "";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return known.what();
  }
}

inline Shape random_shape(std::mt19937& random) {
  const auto pick = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  const int ranks = pick(1, 4);
  return {ranks, ranks * pick(1, 2) + pick(0, 1), pick(1, 8)};
}

inline Mishap random_mishap(const Shape& shape, std::mt19937& random) {
  const auto pick = [&](int below) { return std::uniform_int_distribution<int>(0, below - 1)(random); };
  return {pick(shape.num_stages), pick(shape.num_microbatches), pick(2) == 0, false};
}

// One rank: its stages and its executor. `mishap` may change between steps.
class Rank final {
 public:
  using Connect = std::function<std::unique_ptr<Transport>(const RankProgram&)>;
  // Tells the other ranks of a failure, as the control plane does.
  using Tell = std::function<void()>;

  Rank(const RandomPrograms& programs, std::int32_t rank, const Mishap& mishap, const Connect& connect) {
    const Shape& shape = programs.shape();
    Stages stages(shape.num_stages);
    for (std::int32_t index = 0; index < shape.num_stages; ++index) {
      if (programs.rank_of(index) != rank) continue;
      auto stage = std::make_unique<StubStage>(index, shape.num_stages, shape.num_microbatches, mishap);
      stages_.push_back(stage.get());
      stages[index] = std::move(stage);
    }
    const RankProgram program = programs.program(rank);
    start_.resize(program.size());
    end_.resize(program.size());
    executor_ = std::make_unique<Executor>(
        program, std::move(stages), connect(program), [] { return std::make_unique<StubPayload>(); },
        rank % 2 == 0 ? PairWay::kTogether : PairWay::kMeasured);
  }

  void run(bool announce, Tell tell) {
    Alarm alarm(std::move(tell));
    error_ = nullptr;
    executor_->forget_failure();  // of the step before, told when this rank was through with it
    const std::int64_t before = num_allocations;
    try {
      outcome_ = executor_->run(7, announce, alarm, start_.data(), end_.data());
      error_ = executor_->take_error();
    } catch (...) {
      outcome_ = Outcome::kFailed;
      error_ = std::current_exception();
    }
    allocations_ = num_allocations - before + alarm.beside_allocated;
  }
  void fail() { executor_->fail(); }
  void forget_failure() { executor_->forget_failure(); }
  // What it says of what has come so far; empty: all is good.
  std::string check() const {
    try {
      executor_->check();
    } catch (const std::exception& error) {
      return error.what();
    }
    return "";
  }

  // In the last step, by the executor and its helper.
  std::int64_t allocations() const { return allocations_; }
  Outcome outcome() const { return outcome_; }
  std::string error() const { return text(error_); }

  void expect_done() const {
    expect(outcome_ == Outcome::kDone, "a good step is done on every rank: " + error());
    for (std::size_t i = 0; i < start_.size(); ++i) {
      expect(0 < start_[i] && start_[i] <= end_[i], "a span ends after it starts");
    }
    for (const StubStage* stage : stages_) expect(stage->num_never_run() == 0, "every W ran");
  }

  void expect_backwards(std::int64_t each) const {
    for (const StubStage* stage : stages_) expect(stage->num_backwards() == each, "each backward ran once");
  }

 private:
  class Alarm final : public Observer {
   public:
    explicit Alarm(Tell tell) : tell_(std::move(tell)) {}
    void starts(std::size_t) noexcept override {}
    void ends(std::size_t) noexcept override {}
    void failed(std::size_t, const std::exception_ptr&) noexcept override { tell_(); }
    void run_overlapped(std::size_t, FunctionRef<void()> backward) override {
      const std::int64_t before = num_allocations;
      backward();
      beside_allocated += num_allocations - before;
    }

    std::int64_t beside_allocated = 0;  // the executor waits for its helper before it goes on

   private:
    Tell tell_;
  };

  std::vector<StubStage*> stages_;  // the executor's
  std::unique_ptr<Executor> executor_;
  std::vector<double> start_;
  std::vector<double> end_;
  std::int64_t allocations_ = 0;
  Outcome outcome_ = Outcome::kDone;
  std::exception_ptr error_;
};

// Ends all at once, as processes do: one by one they would wait for each other.
template <typename Owner>
void end_together(std::vector<Owner>& owners) {
  std::vector<std::thread> threads;
  for (Owner& owner : owners) threads.emplace_back([&owner] { owner.reset(); });
  for (std::thread& thread : threads) thread.join();
}

// All ranks of a program, each a thread in every step.
class Ranks final {
 public:
  // connect: makes what a rank sends and receives with, in the order of the ranks.
  Ranks(const RandomPrograms& programs, const Rank::Connect& connect) : programs_(programs) {
    for (std::int32_t rank = 0; rank < programs_.shape().num_ranks; ++rank) {
      ranks_.push_back(std::make_unique<Rank>(programs_, rank, mishap_, connect));
    }
  }

  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;
  ~Ranks() { end_together(ranks_); }

  void step(bool announce, const Mishap& mishap = {}, std::int32_t absent = kNone) {
    mishap_ = mishap;
    for (const auto& rank : ranks_) {
      if (rank) rank->forget_failure();
    }
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      if (static_cast<std::int32_t>(rank) == absent) continue;
      threads.emplace_back([this, rank, announce] {
        ranks_[rank]->run(announce, [this] {
          for (const auto& other : ranks_) {
            if (other) other->fail();
          }
        });
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  void good_step(bool announce) {
    step(announce);
    for (const auto& rank : ranks_) rank->expect_done();
  }

  // The rank of the mishap alone fails, and says why; the others are drained, or were done already.
  void bad_step(bool announce, const Mishap& mishap, const std::string& message = "mishap") {
    step(announce, mishap);
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      const bool own = static_cast<std::int32_t>(rank) == programs_.rank_of(mishap.stage);
      const std::string found = ranks_[rank]->error();
      expect((ranks_[rank]->outcome() == Outcome::kFailed) == own, "the rank of a mishap alone fails: " + found);
      expect(!own || found.find(message) != std::string::npos, "with its own error, not " + found);
    }
  }

  // For good: its transport ends. It is to be absent from then on.
  void leave(std::size_t rank) { ranks_[rank].reset(); }

  const Rank& operator[](std::size_t rank) const { return *ranks_[rank]; }
  const Shape& shape() const { return programs_.shape(); }

 private:
  RandomPrograms programs_;
  Mishap mishap_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

// A failure before anything is known, good steps, failures when all is known, and a good step again.
inline void fail_and_recover(Ranks& ranks, std::mt19937& random) {
  ranks.bad_step(true, random_mishap(ranks.shape(), random));
  ranks.good_step(true);
  for (int step = 0; step < 3; ++step) {
    ranks.good_step(false);
    ranks.bad_step(false, random_mishap(ranks.shape(), random));
  }
  ranks.good_step(false);
}

// Two ranks; a message whose size was announced otherwise.
inline void change_size(Ranks& ranks) {
  ranks.good_step(true);
  ranks.bad_step(false, {0, 1, false, true},
                 "expected 17 numbers, as in the first step with this input, found 18 numbers");
  ranks.good_step(false);
}

}  // namespace fastpipe::testing
