// Writes one rank's instructions: the last pass of fastpipe/lower.py, with its pass that places the waits for sends.
#pragma once

#include <functional>
#include <queue>
#include <unordered_map>
#include <utility>
#include <vector>

#include "plan/flow.h"

namespace fastpipe::plan {

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
