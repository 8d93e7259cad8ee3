// The executor's loop over shared memory within hosts and loopback between them, with a stub in place of torch.
// Run: programs mixed_test [number of programs] [first seed]
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "mixed_ranks.h"

namespace fastpipe::testing::mixed_test {

namespace {

void test_random_program(std::uint32_t seed) {
  std::mt19937 random(seed);
  const Shape shape = random_shape(random);
  Hosts hosts;
  for (std::int32_t rank = 0; rank < shape.num_ranks; ++rank) hosts.push_back(static_cast<std::int32_t>(random() % 2));
  Ranks ranks = ranks_on_hosts(shape, seed, hosts, seed % 4 == 3 ? 40 : seed % 4);
  fail_and_recover(ranks, random);
}

void test_changed_size_is_refused(const Hosts& hosts) {
  Ranks ranks = ranks_on_hosts({2, 2, 3}, 1, hosts, 0);
  change_size(ranks);
}

// --- a rank that blocks for a far message, while near ones wait for room
// -----------------------------------------------

// Rank 0 sends messages to rank 1 of its host, which has one slot for them; then rank 1 sends one to rank 2 of another
// host, and rank 2 one to rank 0.
constexpr std::int32_t kCount = 8;
constexpr std::size_t kLarge = 200000;  // numbers: so few cells are made that not all messages have room at once
const std::vector<Channel> kTriangle{
    {0, 1, ChannelKind::kActivation}, {1, 2, ChannelKind::kActivation}, {2, 0, ChannelKind::kActivation}};

std::vector<Instruction> instructions_of(std::int32_t rank) {
  std::vector<Instruction> all;
  // The stage of a message is its receiver's rank, so rank 0 is stage 3, too.
  const auto add = [&](Op op, std::int32_t stage, std::int32_t i, std::int32_t channel, std::int32_t slot) {
    all.push_back({op, stage, i, kNone, kNone, channel, slot});
  };
  const auto receive = [&](std::int32_t i, std::int32_t channel) {
    for (const Op op : {Op::kPostRecv, Op::kWaitRecv, Op::kFree}) add(op, channel + 1, i, channel, 0);
  };
  if (rank == 0) {
    for (std::int32_t i = 0; i < kCount; ++i) add(Op::kSend, 0, i, 0, i);
    receive(0, 2);
    for (std::int32_t i = 0; i < kCount; ++i) add(Op::kWaitSend, 0, i, 0, i);
    return all;
  }
  for (std::int32_t i = 0; i < (rank == 1 ? kCount : 1); ++i) receive(i, rank - 1);
  for (const Op op : {Op::kSend, Op::kWaitSend}) add(op, rank, 0, rank, 0);
  return all;
}

RankProgram program_of(std::int32_t rank) {
  const std::vector<Instruction> all = instructions_of(rank);
  std::vector<std::int32_t> columns(kNumColumns * all.size());
  for (std::size_t i = 0; i < all.size(); ++i) write_column(all[i], i, all.size(), columns);
  return {rank, columns.data(), all.size(), kTriangle};
}

void run_triangle(Transport& transport, const RankProgram& program, bool announce) {
  StubPayload sent, received;
  sent.numbers.assign(kLarge, 7);
  transport.begin_step(1, announce);
  for (std::size_t position = 0; position < program.size(); ++position) {
    const Instruction it = program[position];
    const Transfer transfer{position, it.channel, it.stage, it.microbatch};
    if (it.op == Op::kPostRecv) transport.post_receive(transfer, it.slot, received);
    if (it.op == Op::kWaitRecv) expect(transport.wait_receive(it.slot), "it arrives");
    if (it.op == Op::kFree) expect(received.numbers == sent.numbers, "whole");
    if (it.op == Op::kFree) received.clear();
    if (it.op == Op::kSend) transport.post_send(transfer, it.slot, sent);
    if (it.op == Op::kWaitSend) transport.wait_send(it.slot);
  }
  transport.end_step(true);
}

void test_near_messages_move_while_a_rank_waits_for_a_far_one() {
  const Connect far = over_loopback(kTriangle, {0, 1, 2}, 0);
  const auto links = make_links({3, 3, 1}, [](std::int32_t one, std::int32_t other) { return one < 2 && other < 2; });
  std::vector<std::thread> threads;
  for (std::int32_t rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      std::vector<ChannelNeeds> needs(kTriangle.size());
      for (const std::int32_t other : {0, 1, 2}) count_needs(program_of(other), needs);
      const auto plan = std::make_shared<SharedMemoryChannels>(links[rank], std::make_shared<StubCodec>(0), needs,
                                                               std::vector<bool>{true, false, false});
      const auto transport = over_both(plan, far)(program_of(rank), kPatience);
      for (const bool announce : {true, false, false}) run_triangle(*transport, program_of(rank), announce);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int run(int argc, char** argv) {
  const int count = argc > 1 ? std::atoi(argv[1]) : 100;
  const int first = argc > 2 ? std::atoi(argv[2]) : 0;
  test_changed_size_is_refused({0, 0});
  test_changed_size_is_refused({0, 1});
  test_near_messages_move_while_a_rank_waits_for_a_far_one();
  for (int seed = first; seed < first + count; ++seed) test_random_program(static_cast<std::uint32_t>(seed));
  std::printf("%d programs: ok\n", count);
  return 0;
}

}  // namespace fastpipe::testing::mixed_test
