// One rank's program as C++ sees it; the numbers are those of fastpipe/program.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace fastpipe {

constexpr std::int32_t kNone = -1;

enum class Op : std::int32_t {
  kF = 0,
  kB = 1,
  kI = 2,
  kW = 3,
  kOverlapFB = 4,
  kUnshard = 5,
  kReshard = 6,
  kReduceGrad = 7,
  kPostRecv = 8,
  kWaitRecv = 9,
  kSend = 10,
  kWaitSend = 11,
  kHandOver = 12,
  kFree = 13,
};
constexpr std::int32_t kNumOps = 14;

enum class ChannelKind : std::int32_t { kActivation = 0, kGradient = 1 };

// A FIFO from one rank to another; source and destination are the same for hand-overs.
struct Channel {
  std::int32_t source;
  std::int32_t destination;
  ChannelKind kind;

  bool local() const { return source == destination; }
  std::int32_t peer_of(std::int32_t rank) const { return source == rank ? destination : source; }
  std::string text() const;
};

// As many as the highest that a channel names tells of.
std::int32_t num_ranks(const std::vector<Channel>& channels);

struct Instruction {
  Op op;
  std::int32_t stage;
  std::int32_t microbatch;
  std::int32_t pair_stage;
  std::int32_t pair_microbatch;
  std::int32_t channel;
  std::int32_t slot;
};
constexpr std::size_t kNumColumns = 7;

class RankProgram {
 public:
  // `columns`: kNumColumns rows of `length` numbers, row after row. They are copied.
  RankProgram(std::int32_t rank, const std::int32_t* columns, std::size_t length, std::vector<Channel> channels);

  std::int32_t rank() const { return rank_; }
  std::size_t size() const { return size_; }
  Instruction operator[](std::size_t position) const;
  const std::vector<Channel>& channels() const { return channels_; }
  // The rank at the other end of a channel.
  std::int32_t peer_of(std::size_t channel) const { return channels_[channel].peer_of(rank_); }
  std::int32_t num_slots() const { return num_slots_; }
  std::int32_t num_sends() const { return num_sends_; }
  std::int32_t num_microbatches() const { return num_microbatches_; }
  bool has_backward() const { return has_backward_; }

  // The action in the words of torch's schedules ("2F0", "1SEND_F3"); empty for what has no such text.
  std::string action_text(std::size_t position) const;
  // For messages: "rank 1, instruction 12, SEND of the activation of stage 2, microbatch 0".
  std::string place(std::size_t position) const;

 private:
  void check(std::size_t position) const;
  void count(const Instruction& instruction);
  std::string transfer_text(const Instruction& instruction) const;

  std::int32_t rank_;
  std::size_t size_;
  std::vector<std::int32_t> columns_;
  std::vector<Channel> channels_;
  std::int32_t num_slots_ = 0;
  std::int32_t num_sends_ = 0;
  std::int32_t num_microbatches_ = 0;
  bool has_backward_ = false;
};

bool is_compute(Op op);
// UNSHARD, RESHARD and REDUCE_GRAD.
bool is_collective(Op op);
// Whether the instruction's `slot` numbers a send, and not a receive slot.
bool numbers_send(Op op);
const char* name_of(Op op);
const char* name_of(ChannelKind kind);

}  // namespace fastpipe
