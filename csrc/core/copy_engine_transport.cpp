#include "copy_engine_transport.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <thread>
#include <utility>

#include "common.h"

namespace fastpipe {

namespace {

constexpr std::chrono::microseconds kPause{100};  // where a host waits for another, once for a kind of step

}  // namespace

Connect over_copy_engines(std::shared_ptr<CopyEngineLink> link, std::shared_ptr<const SharedMemoryPlan> announced,
                          std::vector<CopyPlaces> places) {
  return [link = std::move(link), announced = std::move(announced), places = std::move(places)](
             const RankProgram& program, double timeout_seconds) {
    announced->check(program);
    return std::make_unique<CopyEngineTransport>(link, *announced, places, program, timeout_seconds);
  };
}

void add_places(const RankProgram& program, std::vector<CopyPlaces>& places) {
  std::map<std::pair<std::int32_t, std::int32_t>, std::int32_t> place_of;  // by channel and slot
  for (std::size_t position = 0; position < program.size(); ++position) {
    const Instruction it = program[position];
    if (it.op != Op::kPostRecv) continue;
    CopyPlaces& channel = places.at(it.channel);
    const auto [found, is_new] = place_of.try_emplace({it.channel, it.slot}, channel.count);
    channel.count += is_new ? 1 : 0;
    channel.of_message.push_back(found->second);
  }
}

CopyEngineTransport::CopyEngineTransport(std::shared_ptr<CopyEngineLink> link, const SharedMemoryPlan& announced,
                                         std::vector<CopyPlaces> places, const RankProgram& program,
                                         double timeout_seconds)
    : link_(std::move(link)),
      codec_(announced.codec()),
      program_(program),
      places_(std::move(places)),
      timeout_seconds_(timeout_seconds),
      specs_(program.size()),
      announced_(announced, program, timeout_seconds),
      incoming_(program.channels().size()),
      outgoing_(program.channels().size()),
      num_messages_(program.channels().size()),
      receives_(program.num_slots()),
      sends_(program.num_sends()) {
  for (Send& send : sends_) send.copied = link_->engine()->make_mark();
}

void CopyEngineTransport::begin_step(std::int64_t signature, bool announce) {
  link_->watch().broken_peers().require_none();
  specs_.open(signature, announce);
  signature_ = signature;
  announcing_ = announce;
  std::fill(num_messages_.begin(), num_messages_.end(), 0);
  if (announce) return announced_.begin_step(signature, true);
  make_room(signature);
}

void CopyEngineTransport::make_room(std::int64_t signature) {
  const std::vector<Channel>& channels = program_.channels();
  const auto used = [&](std::size_t i, std::int32_t end) {
    return !channels[i].local() && end == program_.rank() && places_[i].count > 0;
  };
  if (known_.count(signature) == 0) {
    const std::vector<std::size_t> bytes = count_bytes();
    for (std::size_t i = 0; i < channels.size(); ++i) {
      if (!used(i, channels[i].destination)) continue;
      try {
        incoming_[i] = &link_->incoming(channels[i]);
        incoming_[i]->prepare(static_cast<std::size_t>(places_[i].count), bytes[i]);
      } catch (const std::exception& error) {
        give_up(channels[i].source, error.what());
      }
    }
    for (std::size_t i = 0; i < channels.size(); ++i) {
      if (used(i, channels[i].source)) wait_for_room(i, bytes[i]);
    }
    known_.insert(signature);
  }
  for (CopyIncoming* incoming : incoming_) {
    if (incoming != nullptr) incoming->begin_step();
  }
  for (CopyOutgoing* outgoing : outgoing_) {
    if (outgoing != nullptr) outgoing->begin_step();
  }
}

// By channel: the largest message. At least a line, so that there is a place.
std::vector<std::size_t> CopyEngineTransport::count_bytes() const {
  std::vector<std::size_t> bytes(program_.channels().size(), kSharedLine);
  for (std::size_t position = 0; position < program_.size(); ++position) {
    const Instruction it = program_[position];
    if (it.op != Op::kPostRecv && it.op != Op::kSend) continue;
    bytes[it.channel] = std::max(bytes[it.channel], codec_->size(specs_.at(position)));
  }
  return bytes;
}

void CopyEngineTransport::wait_for_room(std::size_t channel, std::size_t bytes) {
  const std::int32_t peer = peer_of(channel);
  const Clock::time_point deadline = Clock::now() + as_duration(timeout_seconds_);
  while (true) {
    // Asked before the look, for what it showed before it died counts.
    const bool alive = link_->host()->peer(peer)->alive();
    try {
      CopyOutgoing* const outgoing = outgoing_[channel] = link_->outgoing(program_.channels()[channel]);
      if (outgoing != nullptr && outgoing->prepare(static_cast<std::size_t>(places_[channel].count), bytes)) return;
    } catch (const std::exception& error) {
      give_up(peer, error.what());
    }
    if (!alive) give_up(peer, "its process died");
    if (Clock::now() >= deadline) give_up(peer, "it did not begin the step");
    std::this_thread::sleep_for(kPause);
  }
}

bool CopyEngineTransport::usable(std::int32_t channel) {
  if (!link_->watch().broken(peer_of(channel))) return true;
  tell();
  return false;
}

void CopyEngineTransport::tell() {
  if (link_->watch().any_broken() && !std::exchange(told_, true)) fail();
}

// Of all ranks, since what came of a queue that another one has let go may have come through others to this one.
void CopyEngineTransport::check() const {
  if (link_->watch().any_broken()) fail();
  if (const auto found = link_->host()->find_let_go()) {
    const auto [rank, blamed] = *found;
    throw TransportError(blamed, "rank " + std::to_string(program_.rank()) + ": what rank " + std::to_string(rank) +
                                     " sent may be no message, as it waits no more for rank " + std::to_string(blamed) +
                                     "; see what that rank was doing, or set a longer timeout");
  }
}

void CopyEngineTransport::give_up(std::int32_t peer, const std::string& why) {
  link_->watch().give_up(peer, why, peer);
  told_ = true;
  fail();
}

void CopyEngineTransport::fail() const {
  const BrokenPeers broken = link_->watch().broken_peers();
  BrokenPeers::refuse(broken.first(), "rank " + std::to_string(program_.rank()), broken.why());
}

void CopyEngineTransport::post_receive(const Transfer& transfer, std::int32_t slot, Payload& into) {
  Receive& receive = receives_[slot];
  receive = {false, transfer, 0, 0, &into};
  if (announcing_) return announced_.post_receive(transfer, slot, into);
  if (!usable(transfer.channel)) return;
  try {
    receive.place = next_place(transfer.channel);
    receive.message = incoming_[transfer.channel]->post(receive.place);
  } catch (const std::exception& error) {
    give_up(peer_of(transfer.channel), error.what());
  }
  receive.posted = true;
}

bool CopyEngineTransport::wait_receive(std::int32_t slot) {
  Receive& receive = receives_[slot];
  if (announcing_) {
    if (!announced_.wait_receive(slot)) return false;
    specs_.learn(receive.transfer.position, receive.into->spec());
    return true;
  }
  if (!std::exchange(receive.posted, false) || !usable(receive.transfer.channel)) return false;
  CopyIncoming& incoming = *incoming_[receive.transfer.channel];
  CopyLoan loan = incoming.take(receive.message, receive.place, receive.transfer.stage);
  // What waits in the host's own time may have been released just now.
  if (!usable(receive.transfer.channel) || !loan.active()) return false;
  codec_->adopt(*receive.into, specs_.at(receive.transfer.position), std::move(loan));
  return true;
}

void CopyEngineTransport::post_send(const Transfer& transfer, std::int32_t send, const Payload& from) {
  if (announcing_) {
    specs_.learn(transfer.position, from.spec());
    // It may be copied later, when another stage has its turn, and the host copies it.
    wait_for_current(*sends_[send].copied);
    return announced_.post_send(transfer, send, from);
  }
  if (!specs_.fits(transfer.position, from)) specs_.refuse(transfer.position, from, program_.place(transfer.position));
  hand_over(transfer, send, [&](CopyOutgoing& outgoing, Send& it) {
    parts_.clear();
    codec_->list(from, parts_);
    // Its place may be granted again before it is sent.
    if (std::any_of(parts_.begin(), parts_.end(), [&](const auto& part) { return link_->lies_in_place(part.data); })) {
      it.kept = codec_->duplicate(parts_);
    }
    outgoing.send(next_place(transfer.channel), parts_, *it.copied);
  });
}

// The host waits for all that the current queue has.
void CopyEngineTransport::wait_for_current(CopyMark& mark) {
  link_->engine()->current().record(mark);
  while (!mark.reached()) std::this_thread::sleep_for(kPause);
}

void CopyEngineTransport::post_stand_in(const Transfer& transfer, std::int32_t send) {
  if (announcing_) return announced_.post_stand_in(transfer, send);
  hand_over(transfer, send, [&](CopyOutgoing& outgoing, Send& it) {
    outgoing.stand_in(next_place(transfer.channel), codec_->size(specs_.at(transfer.position)), *it.copied);
  });
}

template <typename Body>
void CopyEngineTransport::hand_over(const Transfer& transfer, std::int32_t send, const Body& body) {
  Send& it = sends_[send];
  it.posted = false;
  it.channel = transfer.channel;
  if (!usable(transfer.channel)) return;
  try {
    body(*outgoing_[transfer.channel], it);
  } catch (const std::exception& error) {
    give_up(peer_of(transfer.channel), error.what());
  }
  it.posted = true;
}

double CopyEngineTransport::wait_send(std::int32_t send) {
  if (announcing_) return announced_.wait_send(send);
  Send& it = sends_[send];
  if (!std::exchange(it.posted, false)) return 0;
  link_->engine()->current().wait(*it.copied);
  it.kept.reset();
  usable(it.channel);
  return 0;
}

void CopyEngineTransport::end_step(bool complete) {
  specs_.close(complete);
  if (announcing_) {
    known_.erase(signature_);
    return announced_.end_step(complete);
  }
  tell();
  const auto posted = [](const auto& it) { return it.posted; };
  const bool left =
      std::any_of(receives_.begin(), receives_.end(), posted) || std::any_of(sends_.begin(), sends_.end(), posted);
  if (!left || link_->watch().any_broken()) return;
  throw Error("rank " + std::to_string(program_.rank()) +
              ": a channel is not empty at the end of the step; lower the schedule again and validate it");
}

}  // namespace fastpipe
