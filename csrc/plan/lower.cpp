// From orders to what every rank executes: how data flows, and the instructions of a rank.
#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <memory>
#include <queue>
#include <unordered_map>
#include <utility>
#include <vector>

#include "plan/orders.h"

namespace fastpipe::plan {

namespace {

// What one compute action hands to another; over a channel, or within the rank.
struct Message {
  int32_t channel;
  int32_t stage;  // the consumer's
  int32_t microbatch;
  int32_t producer;  // position among the source's actions
  int32_t consumer;  // position among the destination's actions
  int32_t posted;    // the position before which its receive is posted
  int32_t slot;      // of its buffer
};

// All messages of a schedule, by who makes them and who takes them: the first passes of fastpipe/lower.py.
class Flow {
 public:
  explicit Flow(const Orders& orders) : orders_(orders) {}

  // False where the schedule is not a valid one.
  bool build() {
    const int64_t pairs = orders_.num_pairs();
    if (pairs > orders_.num_entries() * 2 || pairs > std::numeric_limits<int32_t>::max() / 2) return false;
    made_as_.assign(2 * pairs, kNone);
    last_use_.assign(pairs, kNone);
    std::vector<int32_t> channel_to(size_t{2} * orders_.num_ranks(), kNone);
    for (int32_t rank = 0; rank < orders_.num_ranks(); ++rank) {
      if (!check(rank) || !make(rank, channel_to)) return false;
    }
    first_made_.push_back(static_cast<int64_t>(messages_.size()));
    for (int32_t rank = 0; rank < orders_.num_ranks(); ++rank) {
      if (!take(rank)) return false;
    }
    sort_by_channel();
    return std::all_of(messages_.begin(), messages_.end(), [this](const Message& m) {
      return m.consumer != kNone && (!channels_[m.channel].stays() || m.producer < m.consumer);
    });
  }

  // Where each receive is posted: `ahead` actions before its consumer, never out of the sender's order.
  void place_receives(int32_t ahead) {
    for (size_t c = 0; c < channels_.size(); ++c) {
      if (channels_[c].stays()) continue;
      int32_t position = std::numeric_limits<int32_t>::max();
      for (int64_t k = first_of_[c + 1] - 1; k >= first_of_[c]; --k) {
        Message& message = messages_[by_channel_[k]];
        position = std::min(position, std::max(0, message.consumer - ahead));
        message.posted = position;
      }
    }
  }

  const Orders& orders() const { return orders_; }
  const std::vector<Channel>& channels() const { return channels_; }
  Message& message(int64_t number) { return messages_[number]; }

  // The messages that a rank makes are neighbours, in the order in which it makes them.
  int64_t first_made(int32_t rank) const { return first_made_[rank]; }
  int64_t size_of(int32_t channel) const { return first_of_[channel + 1] - first_of_[channel]; }
  int32_t number_of(int32_t channel, int64_t index) const { return by_channel_[first_of_[channel] + index]; }
  Message& message_of(int32_t channel, int64_t index) { return messages_[number_of(channel, index)]; }

  // The message that a forward or backward takes, or kNone.
  int32_t taken_by(const Part& part) const {
    if (part.kind == kW) return kNone;
    return made_as_[key(part.kind == kF ? kActivation : kGradient, part.stage, part.microbatch)];
  }

  // The last action of a rank that may read the pair's input or gradient.
  int32_t last_use(const Message& message) const { return last_use_[orders_.pair(message.stage, message.microbatch)]; }

  // Instructions of every rank.
  std::vector<int64_t> counts() const {
    std::vector<int64_t> counts(orders_.num_ranks());
    for (int32_t rank = 0; rank < orders_.num_ranks(); ++rank) counts[rank] = orders_.rows(rank).size();
    for (size_t c = 0; c < channels_.size(); ++c) {
      const int64_t size = first_of_[c + 1] - first_of_[c];
      counts[channels_[c].source] += 2 * size;                                  // SEND, WAIT_SEND; or HAND_OVER, FREE
      if (!channels_[c].stays()) counts[channels_[c].destination] += 3 * size;  // POST_RECV, WAIT_RECV, FREE
    }
    return counts;
  }

 private:
  bool check(int32_t rank) const {
    const Rows rows = orders_.rows(rank);
    if (rows.size() > std::numeric_limits<int32_t>::max() / 8) return false;
    for (int64_t i = 0; i < rows.size(); ++i) {
      if (rows.op(i) < kF || rows.op(i) > kReduceGrad) return false;
      for (const Part& part : rows.parts(i)) {
        if (!orders_.in_range(part.stage, part.microbatch)) return false;
        if (orders_.owner(part.stage, part.microbatch) != rank) return false;
      }
    }
    return true;
  }

  // `channel_to`: by destination and kind, the rank's channel; left as it was found.
  bool make(int32_t rank, std::vector<int32_t>& channel_to) {
    const Rows rows = orders_.rows(rank);
    const size_t first_channel = channels_.size();
    first_made_.push_back(static_cast<int64_t>(messages_.size()));
    for (int64_t i = 0; i < rows.size(); ++i) {
      for (const Part& part : rows.parts(i)) {
        const int32_t target = orders_.target(part);
        if (target == kNone) continue;
        const int32_t kind = part.kind == kF ? kActivation : kGradient;
        const int32_t destination = orders_.owner(target, part.microbatch);
        int32_t& channel = channel_to[2 * destination + kind];
        if (channel == kNone) {
          channel = static_cast<int32_t>(channels_.size());
          channels_.push_back({rank, destination, kind});
        }
        int32_t& made = made_as_[key(kind, target, part.microbatch)];
        if (made != kNone) return false;
        made = static_cast<int32_t>(messages_.size());
        messages_.push_back({channel, target, part.microbatch, static_cast<int32_t>(i), kNone, kNone, kNone});
      }
    }
    for (size_t c = first_channel; c < channels_.size(); ++c) {
      channel_to[2 * channels_[c].destination + channels_[c].kind] = kNone;
    }
    return true;
  }

  bool take(int32_t rank) {
    const Rows rows = orders_.rows(rank);
    for (int64_t i = 0; i < rows.size(); ++i) {
      for (const Part& part : rows.parts(i)) {
        last_use_[orders_.pair(part.stage, part.microbatch)] = static_cast<int32_t>(i);
        const int32_t number = taken_by(part);
        if (number == kNone) continue;
        if (messages_[number].consumer != kNone) return false;
        messages_[number].consumer = static_cast<int32_t>(i);
      }
    }
    return true;
  }

  void sort_by_channel() {
    first_of_.assign(channels_.size() + 1, 0);
    for (const Message& message : messages_) ++first_of_[message.channel + 1];
    for (size_t c = 0; c < channels_.size(); ++c) first_of_[c + 1] += first_of_[c];
    by_channel_.resize(messages_.size());
    std::vector<int64_t> next(first_of_.begin(), first_of_.end() - 1);
    for (size_t m = 0; m < messages_.size(); ++m) by_channel_[next[messages_[m].channel]++] = static_cast<int32_t>(m);
  }

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

// Writes one rank's instructions: the last pass of fastpipe/lower.py, with its pass that places the waits for sends.
class Emitter {
 public:
  // `out` holds seven rows of `count` entries. `bounded`: see fastpipe_plan_lower.
  Emitter(Flow& flow, int32_t rank, int32_t bounded, int32_t* out, int64_t count)
      : flow_(flow), rank_(rank), bounded_(bounded), out_(out), count_(count) {
    send_of_.assign(flow.first_made(rank + 1) - flow.first_made(rank), kNone);
    const auto positions = static_cast<size_t>(flow.orders().rows(rank).size());
    first_free_.assign(positions, kNone);
    last_free_.assign(positions, kNone);
    find_channels();
  }

  // False if `count` was not the number of instructions.
  bool run() {
    const Rows rows = flow_.orders().rows(rank_);
    for (int64_t i = 0; i < rows.size(); ++i) {
      const Parts parts = rows.parts(i);
      post_receives(i);
      take_messages(parts);
      wait_for_sends(i, parts);
      compute(rows, i);
      hand_on(parts);
      free_slots(i);
    }
    for (int64_t m = 0; m < static_cast<int64_t>(send_of_.size()); ++m) {
      if (send_of_[m] != kNone) wait_send(static_cast<int32_t>(flow_.first_made(rank_) + m));
    }
    return written_ == count_;
  }

 private:
  struct Incoming {
    int32_t channel;
    int64_t posted = 0;
  };
  struct Link {
    int32_t message;
    int32_t next;
  };

  void find_channels() {
    for (int32_t c = 0; c < static_cast<int32_t>(flow_.channels().size()); ++c) {
      const Channel& channel = flow_.channels()[c];
      if (channel.stays()) continue;
      if (channel.source == rank_) outgoing_.push_back({c});
      if (channel.destination == rank_) incoming_.push_back({c});
    }
  }

  void post_receives(int64_t position) {
    for (Incoming& incoming : incoming_) {
      while (incoming.posted < flow_.size_of(incoming.channel)) {
        Message& message = flow_.message_of(incoming.channel, incoming.posted);
        if (message.posted != position) break;
        message.slot = slots_.take(message.channel);
        move(kPostRecv, message, message.stage, message.slot);
        ++incoming.posted;
      }
    }
  }

  void take_messages(const Parts& parts) {
    for (const Part& part : parts) {
      const int32_t number = flow_.taken_by(part);
      if (number == kNone) continue;
      const Message& message = flow_.message(number);
      if (!stays(message)) move(kWaitRecv, message, message.stage, message.slot);
      const int32_t at = flow_.last_use(message);
      const auto link = static_cast<int32_t>(links_.size());
      links_.push_back({number, kNone});
      (first_free_[at] == kNone ? first_free_[at] : links_[last_free_[at]].next) = link;
      last_free_[at] = link;
    }
  }

  void wait_for_sends(int64_t position, const Parts& parts) {
    for (Outgoing& outgoing : outgoing_) {
      if (bounded_ > 0) {
        wait_for_bounded(position, outgoing);
      } else {
        wait_for_proven(position, outgoing, parts);
      }
    }
  }

  // What the receiver made, at or after the action that took a message, and what has arrived here, proves that it took
  // it.
  void wait_for_proven(int64_t position, Outgoing& outgoing, const Parts& parts) {
    const int32_t receiver = flow_.channels()[outgoing.channel].destination;
    std::array<int32_t, 2> news{};
    int count = 0;
    for (const Part& part : parts) {
      const int32_t number = flow_.taken_by(part);
      if (number == kNone) continue;
      const Message& message = flow_.message(number);
      if (flow_.channels()[message.channel].source == receiver) news[count++] = message.producer;
    }
    if (count == 2 && news[1] < news[0]) std::swap(news[0], news[1]);
    for (int n = 0; n < count; ++n) {
      for (; outgoing.sent < flow_.size_of(outgoing.channel); ++outgoing.sent) {
        const Message& message = flow_.message_of(outgoing.channel, outgoing.sent);
        if (message.producer >= position) break;
        outgoing.outstanding.emplace(message.consumer, outgoing.sent);
      }
      while (!outgoing.outstanding.empty() && outgoing.outstanding.top().first <= news[n]) {
        wait_send(flow_.number_of(outgoing.channel, outgoing.outstanding.top().second));
        outgoing.outstanding.pop();
      }
    }
  }

  void wait_for_bounded(int64_t position, Outgoing& outgoing) {
    while (outgoing.sent + bounded_ < flow_.size_of(outgoing.channel)) {
      if (flow_.message_of(outgoing.channel, outgoing.sent + bounded_).producer != position) break;
      wait_send(flow_.number_of(outgoing.channel, outgoing.sent));
      ++outgoing.sent;
    }
  }

  void compute(const Rows& rows, int64_t i) {
    const bool stage_only = rows.op(i) >= kUnshard;
    put(rows.op(i), rows.stage(i), stage_only ? kNone : rows.microbatch(i), rows.pair_stage(i), rows.pair_microbatch(i),
        kNone, kNone);
  }

  void hand_on(const Parts& parts) {
    for (const Part& part : parts) {
      if (flow_.orders().target(part) == kNone) continue;
      Message& message = flow_.message(flow_.first_made(rank_) + made_);
      if (stays(message)) {
        message.slot = slots_.take(message.channel);
        move(kHandOver, message, message.stage, message.slot);
      } else {
        send_of_[made_] = sends_.take(0);
        move(kSend, message, producer_stage(message), send_of_[made_]);
      }
      ++made_;
    }
  }

  void free_slots(int64_t position) {
    for (int32_t link = first_free_[position]; link != kNone; link = links_[link].next) {
      const Message& message = flow_.message(links_[link].message);
      slots_.give(message.channel, message.slot);
      move(kFree, message, message.stage, message.slot);
    }
  }

  void wait_send(int32_t number) {
    const Message& message = flow_.message(number);
    int32_t& send = send_of_[number - flow_.first_made(rank_)];
    sends_.give(0, send);
    move(kWaitSend, message, producer_stage(message), send);
    send = kNone;
  }

  void put(int32_t op, int32_t stage, int32_t microbatch, int32_t pair_stage, int32_t pair_microbatch, int32_t channel,
           int32_t slot) {
    if (written_ < count_) {
      const std::array<int32_t, 7> row{op, stage, microbatch, pair_stage, pair_microbatch, channel, slot};
      for (size_t field = 0; field < row.size(); ++field) out_[field * count_ + written_] = row[field];
    }
    ++written_;
  }

  void move(int32_t op, const Message& message, int32_t stage, int32_t number) {
    put(op, stage, message.microbatch, kNone, kNone, message.channel, number);
  }

  bool stays(const Message& message) const { return flow_.channels()[message.channel].stays(); }

  int32_t producer_stage(const Message& message) const {
    return message.stage + (flow_.channels()[message.channel].kind == kActivation ? -1 : 1);
  }

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

// What is known before the instructions are written; they go straight into the caller's arrays.
struct Lowered {
  explicit Lowered(const PlanOrders& given) : given(given), orders(this->given), flow(orders) {}
  const PlanOrders given;  // the arrays it points to must outlive it
  const Orders orders;
  Flow flow;
  std::vector<int64_t> counts;
  int32_t bounded = 0;
};

std::unique_ptr<Lowered> lower(const PlanOrders& given, int32_t ahead, int32_t bounded) {
  auto lowered = std::make_unique<Lowered>(given);
  if (!lowered->flow.build()) return nullptr;
  lowered->flow.place_receives(ahead);
  lowered->counts = lowered->flow.counts();
  lowered->bounded = bounded;
  return lowered;
}

}  // namespace

}  // namespace fastpipe::plan

using fastpipe::plan::Channel;
using fastpipe::plan::Emitter;
using fastpipe::plan::Lowered;

extern "C" {

void* fastpipe_plan_lower(const PlanOrders* orders, int32_t ahead, int32_t bounded) {
  return fastpipe::plan::guarded<void*>(nullptr,
                                        [&] { return fastpipe::plan::lower(*orders, ahead, bounded).release(); });
}

int32_t fastpipe_plan_num_channels(const void* lowered) {
  return static_cast<int32_t>(static_cast<const Lowered*>(lowered)->flow.channels().size());
}

void fastpipe_plan_channels(const void* lowered, int32_t* out) {
  for (const Channel& channel : static_cast<const Lowered*>(lowered)->flow.channels()) {
    *out++ = channel.source;
    *out++ = channel.destination;
    *out++ = channel.kind;
  }
}

int64_t fastpipe_plan_num_instructions(const void* lowered, int32_t rank) {
  return static_cast<const Lowered*>(lowered)->counts[rank];
}

int32_t fastpipe_plan_write(void* lowered, int32_t rank, int32_t* out) {
  auto* self = static_cast<Lowered*>(lowered);
  return fastpipe::plan::guarded<int32_t>(
      0, [&] { return Emitter(self->flow, rank, self->bounded, out, self->counts[rank]).run(); });
}

void fastpipe_plan_free(void* lowered) {
  delete static_cast<Lowered*>(lowered);
}

int32_t fastpipe_plan_version() {
  return 9;
}
}
