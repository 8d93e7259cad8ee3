// The executor's loop over copy engines of threads, with a stub in place of torch: ranks as threads, under the
// sanitizers, and as processes, some of which die.
// Run: programs copy_engine_test [number of programs] [first seed]

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "copy_engine_ranks.h"
#include "core/common.h"
#include "core/copy_engine_transport.h"
#include "harness.h"
#include "process_ranks.h"
#include "stream_stage.h"

namespace fastpipe::testing::copy_engine_test {

namespace {

void test_random_program(std::uint32_t seed) {
  std::mt19937 random(seed);
  const Shape shape = random_shape(random);
  Ranks ranks = ranks_over_engines(shape, seed);
  fail_and_recover(ranks, random);
}

void test_changed_size_is_refused() {
  Ranks ranks = ranks_over_engines({2, 2, 3}, 1);
  change_size(ranks);
}

// By several threads, as who posts a loss and who reads it, and again.
void expect_all_are_told(const Rank& rank, const std::string& what) {
  std::vector<std::string> found(4);
  std::vector<std::thread> threads;
  for (std::string& text : found) threads.emplace_back([&] { text = rank.check(); });
  for (std::thread& thread : threads) thread.join();
  for (const std::string& text : found) expect(text.find(what) != std::string::npos, "told, and not: " + text);
}

// One that takes no part in a known step: streams wait for it, and are released.
void test_silent_peer() {
  Ranks ranks = ranks_over_engines({3, 3, 30}, 1, 3);  // 90 seconds, if it were waited for every message
  ranks.good_step(true);
  ranks.good_step(false);
  const double start = now_seconds();
  ranks.step(false, {}, 1);
  expect(now_seconds() - start < kFarBelowPatience, "a silent peer is given up once, not once a message");
  for (const std::size_t rank : {0, 2}) {
    const std::string error = ranks[rank].error();
    expect(error.find("no transfer with rank 1 any more (nothing came of it in 3.0") != std::string::npos, error);
  }
  ranks.step(false, {}, 1);
  expect(ranks[0].error().find("build the Pipeline again") != std::string::npos, "the transport stays broken");
  expect_all_are_told(ranks[0], "no transfer with rank 1 any more");
}

// What comes of a queue that was let go may come through others, who have given up nobody.
void test_what_another_has_let_go() {
  const RandomPrograms programs({3, 3, 2}, 1);
  const std::vector<Link> links = make_links({3, 3, 2}, [](std::int32_t, std::int32_t) { return true; });
  Ranks ranks(programs, [&](const RankProgram& program) {
    const auto engine = std::make_shared<HostCopyEngine>(1);
    return connect_engines(link_engine(links[program.rank()], engine, kPatience), programs, program);
  });
  ranks.good_step(true);
  ranks.good_step(false);
  expect(ranks[2].check().empty(), ranks[2].check());
  CopyWatchdog watch(1, 20, links[1]->aborted_by());
  watch.abort(0, "a test", 0);
  expect_all_are_told(ranks[2], "rank 2: what rank 1 sent may be no message, as it waits no more for rank 0");
}

// One that ends its transport, as a pipeline does that gives up: who waits for it is told.
void test_peer_that_leaves() {
  Ranks ranks = ranks_over_engines({2, 2, 2}, 1);
  ranks.good_step(true);
  ranks.good_step(false);
  ranks.leave(1);
  ranks.step(false, {}, 1);
  expect(ranks[0].error().find("(it has aborted)") != std::string::npos, ranks[0].error());
}

// Many programs, known one after the other, each run again when all are there: they share places, and what one has not
// used at first is still there when it does.
void test_many_programs() {
  const Shape shape{2, 2, 3};
  const std::vector<Link> hosts = make_links(shape, [](std::int32_t, std::int32_t) { return true; });
  std::vector<std::shared_ptr<HostCopyEngine>> engines;
  std::vector<CopyLink> links;
  for (const Link& host : hosts) {
    engines.push_back(std::make_shared<HostCopyEngine>(1));
    links.push_back(link_engine(host, engines.back(), kPatience));
  }
  std::vector<std::unique_ptr<Ranks>> programs;
  for (std::uint32_t seed = 0; seed < kNumPrograms + 2; ++seed) {
    const RandomPrograms made(shape, seed);
    programs.push_back(std::make_unique<Ranks>(
        made, [&](const RankProgram& program) { return connect_engines(links[program.rank()], made, program); }));
    programs.back()->good_step(true);
  }
  for (int round = 0; round < 2; ++round) {
    for (const auto& ranks : programs) ranks->good_step(false);
  }
  for (const auto& engine : engines) {
    // One channel to each, whose places may have grown a few times.
    expect(engine->num_allocated() <= 4, std::to_string(engine->num_allocated()) + " memories for one channel");
  }
  programs.clear();
  end_together(links);
}

// Of two stages' streams one is late: the words are still looked at.
void test_idle() {
  const auto engine = std::make_shared<HostCopyEngine>(1);
  const Link host = make_links({2, 2, 1}, [](std::int32_t, std::int32_t) { return true; })[0];
  const auto segment = SharedMemorySegment::make(sizeof(CopyWords) + kSharedLine);
  CopyWords& words = *segment->at<CopyWords>(0);
  SharedWord held{1};
  CopyWatchdog watch(0, kPatience, host->aborted_by());
  ThreadQueue late(1);
  ThreadQueue soon(2);
  CopyIncoming incoming(engine, words, watch.add(words.arrived, words.aborted, host->peer(1)));
  incoming.prepare(2, 64);
  incoming.begin_step();
  late.give([&held] {
    while (held.load() != 0) std::this_thread::yield();
  });
  std::vector<CopyLoan> loans;
  for (ThreadQueue* const stream : {&late, &soon}) {
    const std::int32_t stage = stream == &late ? 0 : 1;
    HostCopyEngine::set_current(stream);
    loans.push_back(incoming.take(incoming.post(stage), stage, stage));
  }
  words.arrived.store(2);
  drain(soon);
  expect(!incoming.idle(), "a stage's stream has still to look");
  held.store(0);
  drain(late);
  const double start = now_seconds();
  while (!incoming.idle() && now_seconds() - start < kPatience) std::this_thread::yield();
  expect(incoming.idle(), "all have looked");
  for (CopyLoan& loan : loans) loan.end();
  drain(late);
  drain(soon);
  HostCopyEngine::set_current(nullptr);
}

// --- a device, which is behind its host -----------------------------------------------------------------------------

class Nobody final : public Observer {
 public:
  void starts(std::size_t) noexcept override {}
  void ends(std::size_t) noexcept override {}
  void failed(std::size_t, const std::exception_ptr& error) noexcept override { expect(false, text(error)); }
  void run_overlapped(std::size_t, FunctionRef<void()> backward) override { backward(); }
};

// One rank with a stream a stage. Its steps follow each other without a wait for the streams.
class StreamRank final {
 public:
  StreamRank(const RandomPrograms& programs, const Link& link, bool passes, std::uint32_t seed)
      : engine_(std::make_shared<HostCopyEngine>(seed)), codec_(std::make_shared<StreamCodec>(engine_)) {
    const Shape& shape = programs.shape();
    const RankProgram program = programs.program(link->rank());
    Stages stages(shape.num_stages);
    for (std::int32_t index = 0; index < shape.num_stages; ++index) {
      if (programs.rank_of(index) != link->rank()) continue;
      auto stage = std::make_unique<StreamStage>(index, shape.num_stages, shape.num_microbatches, passes, seed + 100);
      stages_.push_back(stage.get());
      stages[index] = std::move(stage);
    }
    std::vector<ChannelNeeds> needs(programs.channels().size());
    for (std::int32_t rank = 0; rank < shape.num_ranks; ++rank) count_needs(programs.program(rank), needs);
    auto announced = std::make_shared<SharedMemoryChannels>(link, codec_, std::move(needs),
                                                            channels_between_ranks(programs.channels()));
    const Connect connect =
        over_copy_engines(link_engine(link, engine_, kPatience), std::move(announced), places_of(programs));
    executor_ = std::make_unique<Executor>(program, std::move(stages), connect(program, kPatience),
                                           [] { return std::make_unique<StreamPayload>(); });
    start_.resize(program.size());
    end_.resize(program.size());
  }

  void run(int num_steps) {
    Nobody observer;
    for (int step = 0; step < num_steps; ++step) {
      const Outcome outcome = executor_->run(7, step == 0, observer, start_.data(), end_.data());
      expect(outcome == Outcome::kDone, "a step of streams: " + text(executor_->take_error()));
    }
  }
  void expect_right(int num_steps, std::int32_t num_microbatches) {
    for (StreamStage* stage : stages_) {
      stage->finish();
      expect(stage->num_wrong == 0, std::to_string(stage->num_wrong) + " wrong numbers in a stage of streams");
      expect(stage->num_backwards == num_steps * num_microbatches, "each backward ran");
    }
  }
  int num_duplicates() const { return codec_->num_duplicates; }

 private:
  std::shared_ptr<HostCopyEngine> engine_;
  std::shared_ptr<StreamCodec> codec_;
  std::vector<StreamStage*> stages_;  // the executor's
  std::unique_ptr<Executor> executor_;
  std::vector<double> start_;
  std::vector<double> end_;
};

// How often what was sent lay in a place.
int run_streams(std::uint32_t seed, bool passes) {
  std::mt19937 random(seed);
  const Shape shape = random_shape(random);
  const RandomPrograms programs(shape, seed);
  const int num_steps = 4;
  std::vector<std::unique_ptr<StreamRank>> ranks;
  for (const Link& link : make_links(shape, [](std::int32_t, std::int32_t) { return true; })) {
    ranks.push_back(std::make_unique<StreamRank>(programs, link, passes, seed));
  }
  std::vector<std::thread> threads;
  for (const auto& rank : ranks) threads.emplace_back([&rank] { rank->run(num_steps); });
  for (std::thread& thread : threads) thread.join();
  int num_duplicates = 0;
  for (const auto& rank : ranks) {
    rank->expect_right(num_steps, shape.num_microbatches);
    num_duplicates += rank->num_duplicates();
  }
  end_together(ranks);
  return num_duplicates;
}

void test_streams(int first, int count) {
  int num_duplicates = 0;
  for (int seed = first; seed < first + count; ++seed) {
    expect(run_streams(static_cast<std::uint32_t>(seed), false) == 0, "what stages make lies in no place");
    num_duplicates += run_streams(static_cast<std::uint32_t>(seed), true);
  }
  expect(num_duplicates > 0 || count < 4, "what stages hand on does, in some program");
}

// --- what a device must be able to do
// ---------------------------------------------------------------------------------

class DeafQueue final : public HostQueue {
 public:
  using HostQueue::wait;
  void wait(SharedWord&, std::uint32_t) override {}
  void give(std::function<void()> work) override { work(); }
};

class DeafEngine final : public CopyEngine {
 public:
  std::shared_ptr<CopyMemory> allocate(std::size_t bytes) override { return host_.allocate(bytes); }
  CopyTicket ticket(const CopyMemory& memory) override { return host_.ticket(memory); }
  std::shared_ptr<CopyMemory> open(const CopyTicket& ticket) override { return host_.open(ticket); }
  std::shared_ptr<void> expose(std::shared_ptr<SharedMemorySegment>) override {
    if (refuses) throw Error("not on this machine");
    return nullptr;
  }
  std::unique_ptr<CopyQueue> make_queue() override { return std::make_unique<DeafQueue>(); }
  std::unique_ptr<CopyMark> make_mark() override { return host_.make_mark(); }
  CopyQueue& current() override { return host_.current(); }

  bool refuses = false;

 private:
  HostCopyEngine host_;
};

void test_trial() {
  HostCopyEngine good;
  expect(!obstacle_to_flags(good, kPatience), "an engine that can all it must has no obstacle");
  DeafEngine deaf;
  const auto found = obstacle_to_flags(deaf, 5);
  expect(found && found->find("flag") != std::string::npos, "one whose streams do not wait is found out");
  deaf.refuses = true;
  expect(obstacle_to_flags(deaf, 5) == "not on this machine", "and what it says itself is passed on");
}

// --- processes ---------------------------------------------------------------------------------------------------

const ProcessRanks kProcesses(20, [](const Link& link, const RandomPrograms& programs, const RankProgram& program,
                                     std::uint32_t seed) {
  const auto engine = std::make_shared<HostCopyEngine>(seed + static_cast<std::uint32_t>(program.rank()));
  return connect_engines(link_engine(link, engine, kPatience), programs, program);
});

}  // namespace

int run(int argc, char** argv) {
  const int count = argc > 1 ? std::atoi(argv[1]) : 100;
  const int first = argc > 2 ? std::atoi(argv[2]) : 0;
  // Before any thread, since a sanitizer cannot follow a process forked beside them.
  for (int seed = first; seed < first + count / 20; ++seed) kProcesses.test_steps(static_cast<std::uint32_t>(seed));
  kProcesses.test_killed();
  test_changed_size_is_refused();
  test_silent_peer();
  test_peer_that_leaves();
  test_what_another_has_let_go();
  test_trial();
  test_idle();
  test_many_programs();
  test_streams(first, count / 15);
  for (int seed = first; seed < first + count / 8; ++seed) test_random_program(static_cast<std::uint32_t>(seed));
  std::printf("%d programs: ok\n", count);
  return 0;
}

}  // namespace fastpipe::testing::copy_engine_test
