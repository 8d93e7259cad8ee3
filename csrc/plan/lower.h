// From orders to what every rank executes: how data flows, and the instructions of a rank.
#pragma once

#include <functional>
#include <queue>
#include <unordered_map>
#include <utility>
#include <vector>

#include "plan/orders.h"

namespace fastpipe::plan {

// All messages of a schedule, by who makes them and who takes them: the first passes of fastpipe/lower.py.

// What one compute action hands to another; over a channel, or within the rank.
struct Message {
  int32_t channel;
  int32_t stage;  // the consumer's
  int32_t microbatch;
  int32_t producer;  // position among the source's actions
  int32_t consumer;  // position among the destination's actions
  int32_t slot;      // where its receive is posted, until the slot is known
};

class Flow {
 public:
  explicit Flow(const Orders& orders) : orders_(orders) {}

  // False where the schedule is not a valid one.
  bool build();
  // Where each receive is posted: `ahead` actions before its consumer, never out of the sender's order.
  void place_receives(int32_t ahead);

  const Orders& orders() const { return orders_; }
  const std::vector<Channel>& channels() const { return channels_; }
  Message& message(int64_t number) { return messages_[number]; }

  // The messages that a rank makes are neighbours, in the order in which it makes them.
  int64_t first_made(int32_t rank) const { return first_made_[rank]; }
  int64_t size_of(int32_t channel) const { return first_of_[channel + 1] - first_of_[channel]; }
  int32_t number_of(int32_t channel, int64_t index) const { return by_channel_[first_of_[channel] + index]; }
  Message& message_of(int32_t channel, int64_t index) { return messages_[number_of(channel, index)]; }

  // The message that a forward or backward takes, or kNone.
  int32_t taken_by(const Part& part) const;
  // The last action of a rank that may read the pair's input or gradient.
  int32_t last_use(const Message& message) const { return last_use_[orders_.pair(message.stage, message.microbatch)]; }
  // Instructions of every rank.
  std::vector<int64_t> counts() const;

 private:
  bool check(int32_t rank) const;
  bool make(int32_t rank, std::vector<int32_t>& channel_to);
  bool take(int32_t rank);
  void sort_by_channel();
  int64_t key(int32_t kind, int32_t stage, int32_t microbatch) const {
    return kind * orders_.num_pairs() + orders_.pair(stage, microbatch);
  }

  const Orders& orders_;
  std::vector<Channel> channels_;
  std::vector<Message> messages_;
  std::vector<int64_t> first_made_;
  std::vector<int32_t> made_as_;  // by kind, stage and microbatch: the message
  std::vector<int32_t> last_use_;
  std::vector<int64_t> first_of_;
  std::vector<int32_t> by_channel_;
};

// Writes one rank's instructions: the last pass of fastpipe/lower.py, with its pass that places the waits for sends.
template <typename T>
using Lowest = std::priority_queue<T, std::vector<T>, std::greater<T>>;

// Hands out the lowest number that is free, in pools: a pool never takes over another's number.
class Numbers {
 public:
  int32_t take(int32_t pool) {
    Lowest<int32_t>& free = free_[pool];
    if (free.empty()) return count_++;
    const int32_t number = free.top();
    free.pop();
    return number;
  }
  void give(int32_t pool, int32_t number) { free_[pool].push(number); }

 private:
  std::unordered_map<int32_t, Lowest<int32_t>> free_;
  int32_t count_ = 0;
};

// A rank's outgoing channel, and which of its sends are not yet proven complete.
struct Outgoing {
  int32_t channel;
  int64_t sent = 0;
  Lowest<std::pair<int32_t, int64_t>> outstanding{};  // (consumer, index)
};

class Emitter {
 public:
  // `out` holds seven rows of `count` entries. `bounded`: see fastpipe_plan_lower.
  Emitter(Flow& flow, int32_t rank, int32_t bounded, int32_t* out, int64_t count);
  // False if `count` was not the number of instructions.
  bool run();

 private:
  struct Incoming {
    int32_t channel;
    int64_t posted = 0;
  };
  struct Link {
    int32_t message;
    int32_t next;
  };

  void find_channels();
  void before(int64_t position, const Parts& parts);
  void post_receives(int64_t position);
  void take_messages(const Parts& parts);
  void wait_for_sends(int64_t position, const Parts& parts);
  void wait_for_proven(int64_t position, Outgoing& outgoing, const Parts& parts);
  void wait_for_bounded(int64_t position, Outgoing& outgoing);
  void compute(const Rows& rows, int64_t i);
  void hand_on(const Parts& parts);
  void free_slots(int64_t position);
  void wait_send(int32_t number);
  void put(int32_t op, int32_t stage, int32_t microbatch, int32_t pair_stage, int32_t pair_microbatch, int32_t channel,
           int32_t slot);
  void move(int32_t op, const Message& message, int32_t stage, int32_t number);
  bool stays(const Message& message) const { return flow_.channels()[message.channel].stays(); }
  int32_t producer_stage(const Message& message) const;

  Flow& flow_;
  const int32_t rank_;
  const int32_t bounded_;
  int32_t* const out_;
  const int64_t count_;
  int64_t written_ = 0;
  Numbers slots_;
  Numbers sends_;
  std::vector<Incoming> incoming_;
  std::vector<Outgoing> outgoing_;
  std::vector<int32_t> send_of_;  // by message made here: the number of its send while it is under way
  int64_t made_ = 0;
  std::vector<int32_t> first_free_;  // by position: what is freed after it, in the order in which it was taken
  std::vector<int32_t> last_free_;
  std::vector<Link> links_;
};

}  // namespace fastpipe::plan
