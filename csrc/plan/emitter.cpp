#include "plan/emitter.h"

#include <algorithm>
#include <array>

namespace fastpipe::plan {

Emitter::Emitter(Flow& flow, int32_t rank, int32_t bounded, int32_t* out, int64_t count)
    : flow_(flow), rank_(rank), bounded_(bounded), out_(out), count_(count) {
  send_of_.assign(flow.first_made(rank + 1) - flow.first_made(rank), kNone);
  const auto positions = static_cast<size_t>(flow.orders().rows(rank).size());
  first_free_.assign(positions, kNone);
  last_free_.assign(positions, kNone);
  find_channels();
}

void Emitter::find_channels() {
  for (int32_t c = 0; c < static_cast<int32_t>(flow_.channels().size()); ++c) {
    const Channel& channel = flow_.channels()[c];
    if (channel.stays()) continue;
    if (channel.source == rank_) outgoing_.push_back({c});
    if (channel.destination == rank_) incoming_.push_back({c});
  }
}

bool Emitter::run() {
  const Rows rows = flow_.orders().rows(rank_);
  for (int64_t i = 0; i < rows.size(); ++i) {
    const Parts parts = rows.parts(i);
    before(i, parts);
    compute(rows, i);
    hand_on(parts);
    free_slots(i);
  }
  for (int64_t m = 0; m < static_cast<int64_t>(send_of_.size()); ++m) {
    if (send_of_[m] != kNone) wait_send(static_cast<int32_t>(flow_.first_made(rank_) + m));
  }
  return written_ == count_;
}

void Emitter::before(int64_t position, const Parts& parts) {
  post_receives(position);
  take_messages(parts);
  wait_for_sends(position, parts);
}

void Emitter::post_receives(int64_t position) {
  for (Incoming& incoming : incoming_) {
    while (incoming.posted < flow_.size_of(incoming.channel)) {
      Message& message = flow_.message_of(incoming.channel, incoming.posted);
      if (message.slot != position) break;
      message.slot = slots_.take(message.channel);
      move(kPostRecv, message, message.stage, message.slot);
      ++incoming.posted;
    }
  }
}

void Emitter::take_messages(const Parts& parts) {
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

void Emitter::wait_for_sends(int64_t position, const Parts& parts) {
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
void Emitter::wait_for_proven(int64_t position, Outgoing& outgoing, const Parts& parts) {
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

void Emitter::wait_for_bounded(int64_t position, Outgoing& outgoing) {
  while (outgoing.sent + bounded_ < flow_.size_of(outgoing.channel)) {
    if (flow_.message_of(outgoing.channel, outgoing.sent + bounded_).producer != position) break;
    wait_send(flow_.number_of(outgoing.channel, outgoing.sent));
    ++outgoing.sent;
  }
}

void Emitter::compute(const Rows& rows, int64_t i) {
  const bool stage_only = rows.op(i) >= kUnshard;
  put(rows.op(i), rows.stage(i), stage_only ? kNone : rows.microbatch(i), rows.pair_stage(i), rows.pair_microbatch(i),
      kNone, kNone);
}

void Emitter::hand_on(const Parts& parts) {
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

void Emitter::free_slots(int64_t position) {
  for (int32_t link = first_free_[position]; link != kNone; link = links_[link].next) {
    const Message& message = flow_.message(links_[link].message);
    slots_.give(message.channel, message.slot);
    move(kFree, message, message.stage, message.slot);
  }
}

void Emitter::wait_send(int32_t number) {
  const Message& message = flow_.message(number);
  int32_t& send = send_of_[number - flow_.first_made(rank_)];
  sends_.give(0, send);
  move(kWaitSend, message, producer_stage(message), send);
  send = kNone;
}

int32_t Emitter::producer_stage(const Message& message) const {
  return message.stage + (flow_.channels()[message.channel].kind == kActivation ? -1 : 1);
}

void Emitter::move(int32_t op, const Message& message, int32_t stage, int32_t number) {
  put(op, stage, message.microbatch, kNone, kNone, message.channel, number);
}

void Emitter::put(int32_t op, int32_t stage, int32_t microbatch, int32_t pair_stage, int32_t pair_microbatch,
                  int32_t channel, int32_t slot) {
  if (written_ < count_) {
    const std::array<int32_t, 7> row{op, stage, microbatch, pair_stage, pair_microbatch, channel, slot};
    for (size_t field = 0; field < row.size(); ++field) out_[field * count_ + written_] = row[field];
  }
  ++written_;
}

}  // namespace fastpipe::plan
