#include "copy_engine_transport.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "clock.h"
#include "errors.h"

namespace fastpipe {

namespace {

constexpr std::chrono::microseconds kPause{100};  // where a host waits for another, once for a kind of step
constexpr double kLastSeconds = 30;               // at the end, for what is under way

}  // namespace

CopyEngineTransport::CopyEngineTransport(const CopyEngineSource& source, const RankProgram& program,
                                         double timeout_seconds)
    : link_(source.link()),
      codec_(source.codec()),
      program_(program),
      places_(source.places()),
      number_(source.number()),
      timeout_seconds_(timeout_seconds),
      specs_(program.size()),
      announced_(source.announced(), program, timeout_seconds),
      watch_(timeout_seconds, link_->host()->let_go()),
      incoming_(program.channels().size()),
      outgoing_(program.channels().size()),
      receives_(program.num_slots()),
      sends_(program.num_sends()) {
  for (Send& send : sends_) send.copied = link_->engine()->make_mark();
  make_incoming();
  make_outgoing();
}

void CopyEngineTransport::make_incoming() {
  const std::vector<Channel>& channels = program_.channels();
  const auto receives_on = [&](std::size_t i) {
    return !channels[i].local() && channels[i].destination == program_.rank() && places_[i].count > 0;
  };
  const std::size_t table = std::max(kSharedLine, whole_lines(channels.size() * sizeof(std::uint64_t)));
  segment_ = SharedMemorySegment::make(table + channels.size() * sizeof(CopyWords));
  exposed_ = link_->engine()->expose(segment_);
  for (std::size_t i = 0; i < channels.size(); ++i) {
    if (!receives_on(i)) continue;
    const std::size_t offset = table + i * sizeof(CopyWords);
    segment_->at<std::uint64_t>(0)[i] = offset;
    incoming_[i] = std::make_unique<CopyIncoming>(link_, places_[i], segment_, *segment_->at<CopyWords>(offset),
                                                  channels[i], watch_);
  }
  link_->host()->publish(number_, *segment_, fingerprint(places_));
}

void CopyEngineTransport::make_outgoing() {
  const std::vector<Channel>& channels = program_.channels();
  for (std::size_t i = 0; i < channels.size(); ++i) {
    if (channels[i].local() || channels[i].source != program_.rank() || places_[i].count == 0) continue;
    outgoing_[i] = std::make_unique<CopyOutgoing>(link_, places_[i], channels[i]);
  }
}

CopyEngineTransport::~CopyEngineTransport() {
  if (home_.here()) {
    finish();
    return;
  }
  // A forked child has copies of what is the parent's to end.
  for (auto& outgoing : outgoing_) static_cast<void>(outgoing.release());
  for (auto& incoming : incoming_) static_cast<void>(incoming.release());
}

// What was sent arrives, if its receiver takes it; then all is given back, in order.
void CopyEngineTransport::finish() noexcept {
  const double patience = std::min(timeout_seconds_, kLastSeconds);
  Clock::time_point deadline = Clock::now() + as_duration(patience);
  while (!watch_.any_broken() && (watch_.waiting() || busy()) && Clock::now() < deadline) {
    std::this_thread::sleep_for(kPause);
  }
  const std::vector<Channel>& channels = program_.channels();
  for (std::size_t i = 0; i < channels.size() && watch_.waiting(); ++i) {
    const std::int32_t peer = channels[i].peer_of(program_.rank());
    if (incoming_[i] || outgoing_[i]) watch_.give_up(peer, "the transport is gone", program_.rank());
  }
  // What was released runs out. Until then it needs the flags.
  deadline = Clock::now() + as_duration(patience);
  while (busy() && Clock::now() < deadline) std::this_thread::sleep_for(kPause);
  outgoing_.clear();
  incoming_.clear();
}

bool CopyEngineTransport::busy() const noexcept {
  const auto works = [](const auto& end) { return end && !end->idle(); };
  try {
    return std::any_of(outgoing_.begin(), outgoing_.end(), works) ||
           std::any_of(incoming_.begin(), incoming_.end(), works);
  } catch (const std::exception&) {
    return false;  // a device that is lost does nothing any more
  }
}

void CopyEngineTransport::begin_step(std::int64_t signature, bool announce) {
  if (watch_.any_broken()) {
    throw TransportError(watch_.first_broken(), "rank " + std::to_string(program_.rank()) +
                                                    ": the copy-engine transport is broken (no transfer with rank " +
                                                    std::to_string(watch_.first_broken()) + ": " + watch_.why() +
                                                    "); build the Pipeline again");
  }
  specs_.open(signature, announce);
  signature_ = signature;
  announcing_ = announce;
  if (announce) return announced_.begin_step(signature, true);
  make_room(signature);
}

void CopyEngineTransport::make_room(std::int64_t signature) {
  if (known_.count(signature) > 0) return;
  const std::vector<std::size_t> bytes = count_bytes();
  for (std::size_t i = 0; i < incoming_.size(); ++i) {
    if (!incoming_[i]) continue;
    try {
      incoming_[i]->prepare(bytes[i]);
    } catch (const std::exception& error) {
      give_up(incoming_[i]->peer(), error.what());
    }
  }
  for (std::size_t i = 0; i < outgoing_.size(); ++i) {
    if (outgoing_[i]) wait_for_room(static_cast<std::int32_t>(i), bytes[i]);
  }
  known_.insert(signature);
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

void CopyEngineTransport::wait_for_room(std::int32_t channel, std::size_t bytes) {
  const std::int32_t peer = outgoing_[channel]->peer();
  const Clock::time_point deadline = Clock::now() + as_duration(timeout_seconds_);
  while (true) {
    // Asked before the look, for what it showed before it died counts.
    const bool alive = link_->host()->peer(peer)->alive();
    try {
      if (has_room(channel, bytes)) return;
    } catch (const std::exception& error) {
      give_up(peer, error.what());
    }
    if (!alive) give_up(peer, "its process died");
    if (Clock::now() >= deadline) give_up(peer, "it did not begin the step");
    std::this_thread::sleep_for(kPause);
  }
}

bool CopyEngineTransport::has_room(std::int32_t channel, std::size_t bytes) {
  CopyOutgoing& outgoing = *outgoing_[channel];
  if (!outgoing.opened()) {
    CopyWords* const words = words_of(channel);
    if (words == nullptr) return false;
    outgoing.open(*words, watch_);
  }
  return outgoing.prepare(bytes);
}

// Of a channel that this rank sends on; null as long as the receiver has not shown them.
CopyWords* CopyEngineTransport::words_of(std::int32_t channel) {
  const std::int32_t peer = outgoing_[channel]->peer();
  auto found = shown_.find(peer);
  if (found == shown_.end()) {
    auto segment = link_->host()->peer(peer)->rings(number_, fingerprint(places_));
    if (!segment) return nullptr;
    auto exposed = link_->engine()->expose(segment);
    found = shown_.emplace(peer, Shown{std::move(segment), std::move(exposed)}).first;
  }
  const SharedMemorySegment& segment = *found->second.segment;
  const std::uint64_t offset = segment.at<std::uint64_t>(0)[channel];
  if (offset == 0 || offset + sizeof(CopyWords) > segment.size()) {
    throw Error("what it shows makes no sense; run the same version of fastpipe on every rank");
  }
  return segment.at<CopyWords>(offset);
}

bool CopyEngineTransport::usable(std::int32_t channel) {
  if (!watch_.broken(program_.channels()[channel].peer_of(program_.rank()))) return true;
  tell();
  return false;
}

void CopyEngineTransport::tell() {
  if (watch_.any_broken() && !std::exchange(told_, true)) fail();
}

// Of all ranks, since what came of a queue that another one has let go may have come through others to this one.
void CopyEngineTransport::check() const {
  if (watch_.any_broken()) fail();
  if (const auto found = link_->host()->find_let_go()) {
    const auto [rank, blamed] = *found;
    throw TransportError(blamed, "rank " + std::to_string(program_.rank()) + ": what rank " + std::to_string(rank) +
                                     " sent may be no message, as it waits no more for rank " + std::to_string(blamed) +
                                     "; see what that rank was doing, or set a longer timeout");
  }
}

void CopyEngineTransport::give_up(std::int32_t peer, const std::string& why) {
  watch_.give_up(peer, why, peer);
  told_ = true;
  fail();
}

void CopyEngineTransport::fail() const {
  const std::int32_t peer = watch_.first_broken();
  throw TransportError(peer, "rank " + std::to_string(program_.rank()) + ": no transfer with rank " +
                                 std::to_string(peer) + " any more (" + watch_.why() +
                                 "); see what that rank was doing, or set a longer timeout");
}

void CopyEngineTransport::post_receive(const Transfer& transfer, std::int32_t slot, Payload& into) {
  Receive& receive = receives_[slot];
  receive = {false, transfer, 0, &into};
  if (announcing_) return announced_.post_receive(transfer, slot, into);
  if (!usable(transfer.channel)) return;
  CopyIncoming& incoming = *incoming_[transfer.channel];
  try {
    receive.message = incoming.post();
  } catch (const std::exception& error) {
    give_up(incoming.peer(), error.what());
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
  CopyLoan loan = incoming_[receive.transfer.channel]->take(receive.message);
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
    if (lies_in_place(parts_)) it.kept = codec_->duplicate(parts_);
    outgoing.send(parts_, *it.copied);
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
    outgoing.stand_in(codec_->size(specs_.at(transfer.position)), *it.copied);
  });
}

template <typename Body>
void CopyEngineTransport::hand_over(const Transfer& transfer, std::int32_t send, const Body& body) {
  Send& it = sends_[send];
  it.posted = false;
  it.channel = transfer.channel;
  if (!usable(transfer.channel)) return;
  CopyOutgoing& outgoing = *outgoing_[transfer.channel];
  try {
    body(outgoing, it);
  } catch (const std::exception& error) {
    give_up(outgoing.peer(), error.what());
  }
  it.posted = true;
}

bool CopyEngineTransport::lies_in_place(const std::vector<CopyPart>& parts) const {
  return std::any_of(parts.begin(), parts.end(), [&](const CopyPart& part) {
    return std::any_of(incoming_.begin(), incoming_.end(),
                       [&](const auto& incoming) { return incoming && incoming->holds(part.data); });
  });
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
  if (!left || watch_.any_broken()) return;
  throw Error("rank " + std::to_string(program_.rank()) +
              ": a channel is not empty at the end of the step; lower the schedule again and validate it");
}

}  // namespace fastpipe
