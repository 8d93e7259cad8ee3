// Random valid programs for the tests of the core: any order in which every action finds its inputs made, with whole
// and split backwards, and pairs of a forward and a backward.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "core/program.h"

namespace fastpipe::testing {

struct Shape {
  std::int32_t num_ranks;
  std::int32_t num_stages;
  std::int32_t num_microbatches;
};

// An instruction as the columns of a program have it, at a position of so many.
inline void write_column(const Instruction& it, std::size_t position, std::size_t length,
                         std::vector<std::int32_t>& columns) {
  const std::int32_t fields[] = {static_cast<std::int32_t>(it.op),
                                 it.stage,
                                 it.microbatch,
                                 it.pair_stage,
                                 it.pair_microbatch,
                                 it.channel,
                                 it.slot};
  for (std::size_t row = 0; row < kNumColumns; ++row) columns[row * length + position] = fields[row];
}

class RandomPrograms {
 public:
  RandomPrograms(Shape shape, std::uint32_t seed) : shape_(shape), random_(seed), programs_(shape.num_ranks) {
    for (std::int32_t stage = 0; stage < shape_.num_stages; ++stage) {
      rank_of_.push_back(stage < shape_.num_ranks ? stage : pick(shape_.num_ranks));
    }
    for (std::int32_t i = 0; i < shape_.num_stages * shape_.num_microbatches; ++i) splits_.push_back(pick(2) == 0);
    order_actions();
    for (std::int32_t rank = 0; rank < shape_.num_ranks; ++rank) emit(rank);
  }

  std::int32_t rank_of(std::int32_t stage) const { return rank_of_[stage]; }
  const Shape& shape() const { return shape_; }
  const std::vector<Channel>& channels() const { return channels_; }

  // To be made when all channels are known.
  RankProgram program(std::int32_t rank) const {
    const std::vector<Instruction>& instructions = programs_[rank];
    std::vector<std::int32_t> columns(kNumColumns * instructions.size());
    for (std::size_t i = 0; i < instructions.size(); ++i) {
      write_column(instructions[i], i, instructions.size(), columns);
    }
    return {rank, columns.data(), instructions.size(), channels_};
  }

 private:
  struct Action {
    Op op;
    std::int32_t stage;
    std::int32_t microbatch;
  };
  // What is run at once: one action, or a forward and a backward.
  using Parts = std::vector<Action>;

  // A message: what a stage consumes. The order of `messages_` of a channel is the order of its sends.
  struct Message {
    ChannelKind kind;
    std::int32_t stage;
    std::int32_t microbatch;
    std::int32_t channel;
  };

  std::int32_t pick(std::int32_t below) { return std::uniform_int_distribution<std::int32_t>(0, below - 1)(random_); }

  void order_actions() {
    actions_.resize(shape_.num_ranks);
    for (std::vector<Action> ready = ready_actions(); !ready.empty(); ready = ready_actions()) {
      const Action action = ready[pick(static_cast<std::int32_t>(ready.size()))];
      Parts parts{action};
      if (action.op == Op::kF && pick(3) == 0) add_partner(ready, parts);
      for (const Action& part : parts) {
        made_.insert({part.op, part.stage, part.microbatch});
        add_message(part);
      }
      actions_[rank_of_[action.stage]].push_back(parts);
    }
  }

  // Makes a pair of a forward with a whole backward that its rank could run just as well.
  void add_partner(const std::vector<Action>& ready, Parts& parts) const {
    const Action& forward = parts.front();
    const auto partner = std::find_if(ready.begin(), ready.end(), [&](const Action& it) {
      return it.op == Op::kB && rank_of_[it.stage] == rank_of_[forward.stage];
    });
    if (partner != ready.end()) parts.push_back(*partner);
  }

  std::vector<Action> ready_actions() const {
    std::vector<Action> ready;
    for (std::int32_t stage = 0; stage < shape_.num_stages; ++stage) {
      for (std::int32_t microbatch = 0; microbatch < shape_.num_microbatches; ++microbatch) {
        for (const Op op : {Op::kF, Op::kB, Op::kI, Op::kW}) {
          if (is_ready({op, stage, microbatch})) ready.push_back({op, stage, microbatch});
        }
      }
    }
    return ready;
  }

  bool is_made(Op op, std::int32_t stage, std::int32_t microbatch) const {
    return made_.count({op, stage, microbatch}) > 0;
  }

  bool is_ready(const Action& action) const {
    const auto& [op, stage, microbatch] = action;
    if (is_made(op, stage, microbatch)) return false;
    if (op == Op::kF) return stage == 0 || is_made(Op::kF, stage - 1, microbatch);
    const bool splits = splits_[stage * shape_.num_microbatches + microbatch];
    if (splits != (op != Op::kB)) return false;
    if (op == Op::kW) return is_made(Op::kI, stage, microbatch);
    return is_made(Op::kF, stage, microbatch) &&
           (stage == shape_.num_stages - 1 || is_made(Op::kB, stage + 1, microbatch) ||
            is_made(Op::kI, stage + 1, microbatch));
  }

  void add_message(const Action& action) {
    if (action.op == Op::kW) return;
    const bool forward = action.op == Op::kF;
    const std::int32_t to = action.stage + (forward ? 1 : -1);
    if (to < 0 || to >= shape_.num_stages) return;
    const ChannelKind kind = forward ? ChannelKind::kActivation : ChannelKind::kGradient;
    messages_.push_back({kind, to, action.microbatch, channel(rank_of_[action.stage], rank_of_[to], kind)});
  }

  std::int32_t channel(std::int32_t source, std::int32_t destination, ChannelKind kind) {
    for (std::size_t i = 0; i < channels_.size(); ++i) {
      const Channel& it = channels_[i];
      if (it.source == source && it.destination == destination && it.kind == kind) return static_cast<std::int32_t>(i);
    }
    channels_.push_back({source, destination, kind});
    return static_cast<std::int32_t>(channels_.size()) - 1;
  }

  const Message* find(ChannelKind kind, std::int32_t stage, std::int32_t microbatch) const {
    for (const Message& it : messages_) {
      if (it.kind == kind && it.stage == stage && it.microbatch == microbatch) return &it;
    }
    return nullptr;
  }

  void emit(std::int32_t rank) {
    slots_.clear();
    sends_.clear();
    posted_.clear();
    const auto& actions = actions_[rank];
    const std::size_t ahead = static_cast<std::size_t>(pick(3));
    for (std::size_t i = 0; i < actions.size(); ++i) {
      for (std::size_t j = i; j < std::min(actions.size(), i + ahead + 1); ++j) post_for(rank, actions[j]);
      emit_parts(rank, actions[i]);
    }
    for (const auto& [message, number] : sends_) wait_send(rank, *message, number);
  }

  static ChannelKind input_kind(const Action& action) {
    return action.op == Op::kF ? ChannelKind::kActivation : ChannelKind::kGradient;
  }

  const Message* input_of(const Action& action) const {
    return action.op == Op::kW ? nullptr : find(input_kind(action), action.stage, action.microbatch);
  }

  // The receives that these need and, since a channel is in order, all that its channel brings before them.
  void post_for(std::int32_t rank, const Parts& parts) {
    for (const Action& part : parts) post_until(rank, input_of(part));
  }

  void post_until(std::int32_t rank, const Message* wanted) {
    if (wanted == nullptr || channels_[wanted->channel].local()) return;
    for (const Message& message : messages_) {
      if (message.channel == wanted->channel && posted_.insert({&message, true}).second) {
        move(rank, Op::kPostRecv, message, message.stage, take(slots_, &message));
      }
      if (&message == wanted) break;
    }
  }

  void emit_parts(std::int32_t rank, const Parts& parts) {
    for (const Action& part : parts) emit_waits(rank, part);
    const Action& first = parts.front();
    if (parts.size() == 1) {
      programs_[rank].push_back({first.op, first.stage, first.microbatch, kNone, kNone, kNone, kNone});
    } else {
      const Action& other = parts.back();
      programs_[rank].push_back(
          {Op::kOverlapFB, first.stage, first.microbatch, other.stage, other.microbatch, kNone, kNone});
    }
    for (const Action& part : parts) {
      emit_output(rank, part);
      if (part.op == Op::kB || part.op == Op::kW) free_slots(rank, part);
    }
  }

  void emit_waits(std::int32_t rank, const Action& action) {
    const Message* input = input_of(action);
    if (input != nullptr && !channels_[input->channel].local()) {
      move(rank, Op::kWaitRecv, *input, input->stage, slots_.at(input));
    }
    const Message* sent = find(ChannelKind::kActivation, action.stage + 1, action.microbatch);
    if (action.op != Op::kF && sends_.count(sent) > 0) {
      // Its gradient is here, so the consumer has had it.
      wait_send(rank, *sent, sends_.at(sent));
      sends_.erase(sent);
    }
  }

  void emit_output(std::int32_t rank, const Action& action) {
    const Message* output = action.op == Op::kW ? nullptr : output_of(action);
    if (output == nullptr) return;
    if (channels_[output->channel].local()) {
      move(rank, Op::kHandOver, *output, output->stage, take(slots_, output));
    } else {
      move(rank, Op::kSend, *output, action.stage, take(sends_, output));
    }
  }

  const Message* output_of(const Action& action) const {
    return find(input_kind(action), action.stage + (action.op == Op::kF ? 1 : -1), action.microbatch);
  }

  void free_slots(std::int32_t rank, const Action& action) {
    for (const ChannelKind kind : {ChannelKind::kActivation, ChannelKind::kGradient}) {
      const Message* message = find(kind, action.stage, action.microbatch);
      if (message == nullptr) continue;
      move(rank, Op::kFree, *message, message->stage, slots_.at(message));
      slots_.erase(message);
    }
  }

  void wait_send(std::int32_t rank, const Message& message, std::int32_t number) {
    const std::int32_t producer = message.stage + (message.kind == ChannelKind::kActivation ? -1 : 1);
    move(rank, Op::kWaitSend, message, producer, number);
  }

  // The lowest number that none of `numbers` has.
  static std::int32_t take(std::map<const Message*, std::int32_t>& numbers, const Message* message) {
    std::int32_t number = 0;
    const auto taken = [&] {
      return std::any_of(numbers.begin(), numbers.end(), [&](const auto& it) { return it.second == number; });
    };
    while (taken()) ++number;
    return numbers[message] = number;
  }

  void move(std::int32_t rank, Op op, const Message& message, std::int32_t stage, std::int32_t slot) {
    programs_[rank].push_back({op, stage, message.microbatch, kNone, kNone, message.channel, slot});
  }

  Shape shape_;
  std::mt19937 random_;
  std::vector<std::int32_t> rank_of_;
  std::vector<bool> splits_;  // by stage and microbatch: whether I and W take the place of B
  std::vector<std::vector<Parts>> actions_;
  std::set<std::tuple<Op, std::int32_t, std::int32_t>> made_;
  std::vector<Message> messages_;
  std::vector<Channel> channels_;
  std::vector<std::vector<Instruction>> programs_;
  std::map<const Message*, std::int32_t> slots_;
  std::map<const Message*, std::int32_t> sends_;
  std::map<const Message*, bool> posted_;
};

}  // namespace fastpipe::testing
