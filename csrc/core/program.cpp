#include "program.h"

#include <algorithm>
#include <array>
#include <utility>

#include "common.h"

namespace fastpipe {

namespace {

constexpr std::array<const char*, kNumOps> kOpNames = {
    "F",           "B",         "I",         "W",    "OVERLAP_F_B", "UNSHARD",   "RESHARD",
    "REDUCE_GRAD", "POST_RECV", "WAIT_RECV", "SEND", "WAIT_SEND",   "HAND_OVER", "FREE",
};

std::string number(std::int32_t value) {
  return std::to_string(value);
}

}  // namespace

std::int32_t num_ranks(const std::vector<Channel>& channels) {
  std::int32_t highest = -1;
  for (const Channel& channel : channels) highest = std::max({highest, channel.source, channel.destination});
  return highest + 1;
}

bool is_compute(Op op) {
  return op <= Op::kOverlapFB;
}

bool is_collective(Op op) {
  return op == Op::kUnshard || op == Op::kReshard || op == Op::kReduceGrad;
}

bool numbers_send(Op op) {
  return op == Op::kSend || op == Op::kWaitSend;
}

const char* name_of(Op op) {
  return kOpNames.at(static_cast<std::size_t>(op));
}

const char* name_of(ChannelKind kind) {
  return kind == ChannelKind::kActivation ? "activation" : "gradient";
}

std::string Channel::text() const {
  return std::string(name_of(kind)) + " " + number(source) + "->" + number(destination);
}

RankProgram::RankProgram(std::int32_t rank, const std::int32_t* columns, std::size_t length,
                         std::vector<Channel> channels)
    : rank_(rank), size_(length), columns_(columns, columns + kNumColumns * length), channels_(std::move(channels)) {
  for (std::size_t position = 0; position < size_; ++position) {
    check(position);
    count((*this)[position]);
  }
}

Instruction RankProgram::operator[](std::size_t position) const {
  const auto field = [&](std::size_t row) { return columns_[row * size_ + position]; };
  return {static_cast<Op>(field(0)), field(1), field(2), field(3), field(4), field(5), field(6)};
}

void RankProgram::check(std::size_t position) const {
  const std::int32_t op = columns_[position];
  const std::string where = "rank " + number(rank_) + ", instruction " + std::to_string(position) + ": ";
  if (op < 0 || op >= kNumOps) {
    throw ArgumentError(where + "there is no operation number " + number(op) + "; lower the schedule again");
  }
  const Instruction it = (*this)[position];
  const bool moves = it.op >= Op::kPostRecv;
  if (moves && (it.channel < 0 || it.channel >= static_cast<std::int32_t>(channels_.size()))) {
    throw ArgumentError(where + name_of(it.op) + " names channel " + number(it.channel) + " of " +
                        std::to_string(channels_.size()) + "; lower the schedule again");
  }
  if (it.stage < 0 || (moves && it.slot < 0) || (it.microbatch < 0 && (moves || is_compute(it.op)))) {
    throw ArgumentError(where + name_of(it.op) + " has no stage, microbatch or slot; lower the schedule again");
  }
}

void RankProgram::count(const Instruction& it) {
  const bool backward = it.op == Op::kB || it.op == Op::kI || it.op == Op::kW || it.op == Op::kOverlapFB;
  has_backward_ = has_backward_ || backward;
  num_microbatches_ = std::max({num_microbatches_, it.microbatch + 1, it.pair_microbatch + 1});
  std::int32_t& numbers = numbers_send(it.op) ? num_sends_ : num_slots_;
  numbers = std::max(numbers, it.slot + 1);
}

std::string RankProgram::action_text(std::size_t position) const {
  const Instruction it = (*this)[position];
  const std::string stage = number(it.stage);
  const std::string microbatch = it.microbatch == kNone ? "" : number(it.microbatch);
  switch (it.op) {
    case Op::kOverlapFB:
      return "(" + stage + "F" + microbatch + ";" + number(it.pair_stage) + "B" + number(it.pair_microbatch) +
             ")OVERLAP_F_B";
    case Op::kSend:
    case Op::kWaitRecv: {
      const char* direction = it.op == Op::kSend ? "SEND_" : "RECV_";
      const char* what = channels_[it.channel].kind == ChannelKind::kActivation ? "F" : "B";
      return stage + direction + what + microbatch;
    }
    case Op::kPostRecv:
    case Op::kWaitSend:
    case Op::kHandOver:
    case Op::kFree:
      return "";
    default:
      return stage + name_of(it.op) + microbatch;
  }
}

std::string RankProgram::transfer_text(const Instruction& it) const {
  const Channel& channel = channels_[it.channel];
  std::string text = std::string(name_of(it.op)) + " of the " + name_of(channel.kind) + " of stage " +
                     number(it.stage) + ", microbatch " + number(it.microbatch);
  return channel.local() ? text : text + ", peer rank " + number(peer_of(it.channel));
}

std::string RankProgram::place(std::size_t position) const {
  const Instruction it = (*this)[position];
  const std::string what = it.channel == kNone ? action_text(position) : transfer_text(it);
  return "rank " + number(rank_) + ", instruction " + std::to_string(position) + ", " + what;
}

}  // namespace fastpipe
