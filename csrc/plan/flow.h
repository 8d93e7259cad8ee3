// All messages of a schedule, by who makes them and who takes them: the first passes of fastpipe/lower.py.
#pragma once

#include <vector>

#include "plan/orders.h"

namespace fastpipe::plan {

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
  int64_t first_of(int32_t channel) const { return first_of_[channel]; }
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

}  // namespace fastpipe::plan
