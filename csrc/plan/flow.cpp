#include "plan/flow.h"

#include <algorithm>
#include <limits>

namespace fastpipe::plan {

bool Flow::build() {
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

bool Flow::check(int32_t rank) const {
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
bool Flow::make(int32_t rank, std::vector<int32_t>& channel_to) {
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
      messages_.push_back({channel, target, part.microbatch, static_cast<int32_t>(i), kNone, kNone});
    }
  }
  for (size_t c = first_channel; c < channels_.size(); ++c) {
    channel_to[2 * channels_[c].destination + channels_[c].kind] = kNone;
  }
  return true;
}

int32_t Flow::taken_by(const Part& part) const {
  if (part.kind == kW) return kNone;
  return made_as_[key(part.kind == kF ? kActivation : kGradient, part.stage, part.microbatch)];
}

bool Flow::take(int32_t rank) {
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

void Flow::sort_by_channel() {
  first_of_.assign(channels_.size() + 1, 0);
  for (const Message& message : messages_) ++first_of_[message.channel + 1];
  for (size_t c = 0; c < channels_.size(); ++c) first_of_[c + 1] += first_of_[c];
  by_channel_.resize(messages_.size());
  std::vector<int64_t> next(first_of_.begin(), first_of_.end() - 1);
  for (size_t m = 0; m < messages_.size(); ++m) by_channel_[next[messages_[m].channel]++] = static_cast<int32_t>(m);
}

void Flow::place_receives(int32_t ahead) {
  for (size_t c = 0; c < channels_.size(); ++c) {
    if (channels_[c].stays()) continue;
    int32_t position = std::numeric_limits<int32_t>::max();
    for (int64_t k = first_of_[c + 1] - 1; k >= first_of_[c]; --k) {
      Message& message = messages_[by_channel_[k]];
      position = std::min(position, std::max(0, message.consumer - ahead));
      message.slot = position;
    }
  }
}

std::vector<int64_t> Flow::counts() const {
  std::vector<int64_t> counts(orders_.num_ranks());
  for (int32_t rank = 0; rank < orders_.num_ranks(); ++rank) counts[rank] = orders_.rows(rank).size();
  for (size_t c = 0; c < channels_.size(); ++c) {
    const int64_t size = first_of_[c + 1] - first_of_[c];
    counts[channels_[c].source] += 2 * size;                                  // SEND, WAIT_SEND; or HAND_OVER, FREE
    if (!channels_[c].stays()) counts[channels_[c].destination] += 3 * size;  // POST_RECV, WAIT_RECV, FREE
  }
  return counts;
}

}  // namespace fastpipe::plan
