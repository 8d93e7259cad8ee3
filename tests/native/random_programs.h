// Random valid programs for the tests of the core: any order in which every action finds its inputs made.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <tuple>
#include <vector>

#include "core/program.h"

namespace fastpipe::testing {

struct Shape {
  std::int32_t num_ranks;
  std::int32_t num_stages;
  std::int32_t num_microbatches;
};

class RandomPrograms {
 public:
  RandomPrograms(Shape shape, std::uint32_t seed) : shape_(shape), random_(seed), programs_(shape.num_ranks) {
    for (std::int32_t stage = 0; stage < shape_.num_stages; ++stage) {
      rank_of_.push_back(stage < shape_.num_ranks ? stage : pick(shape_.num_ranks));
    }
    order_actions();
    for (std::int32_t rank = 0; rank < shape_.num_ranks; ++rank) emit(rank);
  }

  std::int32_t rank_of(std::int32_t stage) const { return rank_of_[stage]; }
  const std::vector<Channel>& channels() const { return channels_; }

  // To be made when all channels are known.
  RankProgram program(std::int32_t rank) const {
    const std::vector<Instruction>& instructions = programs_[rank];
    std::vector<std::int32_t> columns(kNumColumns * instructions.size());
    for (std::size_t i = 0; i < instructions.size(); ++i) {
      const Instruction& it = instructions[i];
      const std::int32_t fields[] = {static_cast<std::int32_t>(it.op),
                                     it.stage,
                                     it.microbatch,
                                     it.pair_stage,
                                     it.pair_microbatch,
                                     it.channel,
                                     it.slot};
      for (std::size_t row = 0; row < kNumColumns; ++row) columns[row * instructions.size() + i] = fields[row];
    }
    return {rank, columns.data(), instructions.size(), channels_};
  }

 private:
  struct Action {
    Op op;
    std::int32_t stage;
    std::int32_t microbatch;
  };

  // A message: what a stage consumes. The order of `messages_` of a channel is the order of its sends.
  struct Message {
    ChannelKind kind;
    std::int32_t stage;
    std::int32_t microbatch;
    std::int32_t channel;
  };

  std::int32_t pick(std::int32_t below) { return std::uniform_int_distribution<std::int32_t>(0, below - 1)(random_); }

  void order_actions() {
    const std::int32_t total = 2 * shape_.num_stages * shape_.num_microbatches;
    actions_.resize(shape_.num_ranks);
    std::vector<Action> done;
    for (std::int32_t count = 0; count < total; ++count) {
      std::vector<Action> ready;
      for (std::int32_t stage = 0; stage < shape_.num_stages; ++stage) {
        for (std::int32_t microbatch = 0; microbatch < shape_.num_microbatches; ++microbatch) {
          for (const Op op : {Op::kF, Op::kB}) {
            if (is_ready({op, stage, microbatch})) ready.push_back({op, stage, microbatch});
          }
        }
      }
      const Action action = ready[pick(static_cast<std::int32_t>(ready.size()))];
      made_[{action.op, action.stage, action.microbatch}] = true;
      actions_[rank_of_[action.stage]].push_back(action);
      add_message(action);
    }
  }

  bool is_made(Op op, std::int32_t stage, std::int32_t microbatch) const {
    return made_.count({op, stage, microbatch}) > 0;
  }

  bool is_ready(const Action& action) const {
    if (is_made(action.op, action.stage, action.microbatch)) return false;
    if (action.op == Op::kF) return action.stage == 0 || is_made(Op::kF, action.stage - 1, action.microbatch);
    return is_made(Op::kF, action.stage, action.microbatch) &&
           (action.stage == shape_.num_stages - 1 || is_made(Op::kB, action.stage + 1, action.microbatch));
  }

  void add_message(const Action& action) {
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
      emit_action(rank, actions[i]);
    }
    for (const auto& [message, number] : sends_) wait_send(rank, *message, number);
  }

  static ChannelKind input_kind(const Action& action) {
    return action.op == Op::kF ? ChannelKind::kActivation : ChannelKind::kGradient;
  }

  // The receive that the action needs and, since a channel is in order, all that its channel brings before it.
  void post_for(std::int32_t rank, const Action& action) {
    const Message* wanted = find(input_kind(action), action.stage, action.microbatch);
    if (wanted == nullptr || channels_[wanted->channel].local()) return;
    for (const Message& message : messages_) {
      if (message.channel == wanted->channel && posted_.insert({&message, true}).second) {
        move(rank, Op::kPostRecv, message, message.stage, take(slots_, &message));
      }
      if (&message == wanted) break;
    }
  }

  void emit_action(std::int32_t rank, const Action& action) {
    const Message* input = find(input_kind(action), action.stage, action.microbatch);
    if (input != nullptr && !channels_[input->channel].local()) {
      move(rank, Op::kWaitRecv, *input, input->stage, slots_.at(input));
    }
    const Message* sent = find(ChannelKind::kActivation, action.stage + 1, action.microbatch);
    if (action.op == Op::kB && sends_.count(sent) > 0) {
      // Its gradient is here, so the consumer has had it.
      wait_send(rank, *sent, sends_.at(sent));
      sends_.erase(sent);
    }
    programs_[rank].push_back({action.op, action.stage, action.microbatch, kNone, kNone, kNone, kNone});
    emit_output(rank, action);
    if (action.op == Op::kB) free_slots(rank, action);
  }

  void emit_output(std::int32_t rank, const Action& action) {
    const bool forward = action.op == Op::kF;
    const Message* output = find(input_kind(action), action.stage + (forward ? 1 : -1), action.microbatch);
    if (output == nullptr) return;
    if (channels_[output->channel].local()) {
      move(rank, Op::kHandOver, *output, output->stage, take(slots_, output));
    } else {
      move(rank, Op::kSend, *output, action.stage, take(sends_, output));
    }
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
  std::vector<std::vector<Action>> actions_;
  std::map<std::tuple<Op, std::int32_t, std::int32_t>, bool> made_;
  std::vector<Message> messages_;
  std::vector<Channel> channels_;
  std::vector<std::vector<Instruction>> programs_;
  std::map<const Message*, std::int32_t> slots_;
  std::map<const Message*, std::int32_t> sends_;
  std::map<const Message*, bool> posted_;
};

}  // namespace fastpipe::testing
