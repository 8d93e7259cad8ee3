// The exchange of a host's ranks: as threads, under the sanitizers, and as processes, one of which dies or is silent.
// Run: programs exchange_test [number of exchanges] [first seed]
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/common.h"
#include "core/shared_memory_exchange.h"
#include "processes.h"
#include "stub.h"

namespace fastpipe::testing::exchange_test {

namespace {

void expect(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what.c_str());
  std::_Exit(1);
}

// Every rank knows what every other says: of any size, also none, also more than a board holds.
std::string text_of(std::int32_t rank, int exchange, std::uint32_t seed) {
  std::mt19937 random(seed + 1000 * exchange + rank);
  const std::size_t sizes[] = {0, 1, 63, kExchangeBytes - 1, kExchangeBytes, kExchangeBytes + 1, 100000};
  return std::string(sizes[random() % 7], static_cast<char>('a' + random() % 26));
}

std::string text_or_none(const std::optional<std::string>& text) {
  return text ? std::to_string(text->size()) + " bytes" : "none";
}

void run(SharedMemoryExchange& exchange, std::int32_t rank, int count, std::uint32_t seed) {
  for (int number = 0; number < count; ++number) {
    exchange.post(text_of(rank, number, seed));
    expect(exchange.wait(kPatience) && exchange.missing().empty(), "all come");
    for (std::int32_t other = 0; other < exchange.num_ranks(); ++other) {
      const auto found = exchange.message(other);
      expect(found == text_of(other, number, seed), "the message of another, not " + text_or_none(found));
    }
  }
}

using Exchanges = std::vector<std::unique_ptr<SharedMemoryExchange>>;

Exchanges connected(std::int32_t num_ranks, Clock::duration spin) {
  Exchanges made;
  for (std::int32_t rank = 0; rank < num_ranks; ++rank) {
    made.push_back(std::make_unique<SharedMemoryExchange>(rank, num_ranks, spin));
  }
  for (std::int32_t rank = 0; rank < num_ranks; ++rank) {
    for (std::int32_t other = 0; other < num_ranks; ++other) {
      if (other != rank) made[rank]->connect(other, made[other]->address());
    }
  }
  return made;
}

void test_threads(std::uint32_t seed, int count) {
  const auto num_ranks = static_cast<std::int32_t>(1 + seed % 5);
  const Exchanges exchanges = connected(num_ranks, std::chrono::microseconds(seed % 2 == 0 ? 20 : 0));
  std::vector<std::thread> threads;
  for (std::int32_t rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] { run(*exchanges[rank], rank, count, seed); });
  }
  for (std::thread& thread : threads) thread.join();
}

void test_silent_rank_is_named() {
  const Exchanges exchanges = connected(3, Clock::duration::zero());
  exchanges[0]->post("here");
  exchanges[1]->post("here");
  const double start = now_seconds();
  expect(!exchanges[0]->wait(0.2), "one is missing");
  const double took = now_seconds() - start;
  expect(took >= 0.2 && took < kFarBelowPatience, "the time is kept");
  expect(exchanges[0]->missing() == std::vector<std::int32_t>{2}, "it is named");
  exchanges[2]->post("late");
  expect(exchanges[0]->wait(0) && exchanges[0]->message(2) == "late", "and may come later");
  expect(exchanges[0]->message(1) == "here", "what others said is there");
}

void test_rank_that_has_gone_on_is_refused() {
  const Exchanges exchanges = connected(2, Clock::duration::zero());
  for (const char* text : {"first", "second", "third"}) exchanges[0]->post(text);
  exchanges[1]->post("first");
  try {
    exchanges[1]->wait(1);
    expect(false, "another message is not taken for the first");
  } catch (const Error& error) {
    expect(std::string(error.what()).find("rank 0 has continued without rank 1") == 0, error.what());
  }
}

void test_foreign_board_is_refused() {
  SharedMemoryExchange one(0, 2);
  const SharedMemoryExchange other(1, 2);
  PublishedAddress address = other.address();
  ++address.nonce;
  try {
    one.connect(1, address);
    expect(false, "a board with another nonce");
  } catch (const Error& error) {
    expect(std::string(error.what()).find("cannot be read") != std::string::npos, error.what());
  }
}

// --- processes

std::unique_ptr<SharedMemoryExchange> meet(Meeting& meeting, std::int32_t own, std::int32_t num_ranks) {
  auto exchange = std::make_unique<SharedMemoryExchange>(own, num_ranks);
  meet(meeting, *exchange, own, num_ranks);
  // nobody dies before all have opened its words
  meeting.present.fetch_add(1);
  while (meeting.present.load() < 2 * num_ranks) std::this_thread::yield();
  return exchange;
}

void test_processes(std::uint32_t seed, int count) {
  const auto num_ranks = static_cast<std::int32_t>(2 + seed % 3);
  const auto body = [&](Meeting& meeting, std::int32_t own) {
    const auto exchange = meet(meeting, own, num_ranks);
    run(*exchange, own, count, seed);
    return 0;
  };
  for (const int code : run_processes(num_ranks, body)) expect(code == 0, "processes understand each other");
}

// What the victim has posted before it died counts; what comes after is nothing, at once and not after the time.
void test_killed_process() {
  const auto body = [](Meeting& meeting, std::int32_t own) {
    const auto exchange = meet(meeting, own, 3);
    exchange->post("first");
    if (own == 1) ::kill(::getpid(), SIGKILL);
    if (!exchange->wait(kPatience) || exchange->message(1) != "first") return 1;
    exchange->post("second");
    const double start = now_seconds();
    if (!exchange->wait(kPatience) || exchange->message(1) || !exchange->missing().empty()) return 2;
    if (exchange->message(own == 0 ? 2 : 0) != "second") return 3;
    return now_seconds() - start < kFarBelowPatience ? 0 : 4;
  };
  const std::vector<int> codes = run_processes(3, body);
  expect(codes[1] == -SIGKILL, "the victim dies");
  expect(codes[0] == 0 && codes[2] == 0, "the others know: " + std::to_string(codes[0] + codes[2]));
}

}  // namespace

int run(int argc, char** argv) {
  const int count = argc > 1 ? std::atoi(argv[1]) : 200;
  const auto first = static_cast<std::uint32_t>(argc > 2 ? std::atoi(argv[2]) : 0);
  // Before any thread, since a sanitizer cannot follow a process forked beside them.
  for (std::uint32_t seed = first; seed < first + 3; ++seed) test_processes(seed, count);
  test_killed_process();
  test_silent_rank_is_named();
  test_rank_that_has_gone_on_is_refused();
  test_foreign_board_is_refused();
  for (std::uint32_t seed = first; seed < first + 10; ++seed) test_threads(seed, count);
  std::printf("%d exchanges: ok\n", count);
  return 0;
}

}  // namespace fastpipe::testing::exchange_test
