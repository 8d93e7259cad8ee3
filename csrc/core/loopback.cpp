#include "loopback.h"

#include <algorithm>
#include <utility>

#include "errors.h"

namespace fastpipe {

namespace {

std::int32_t consumer(const Transfer& transfer, ChannelKind kind, bool is_send) {
  if (!is_send) return transfer.stage;
  return transfer.stage + (kind == ChannelKind::kActivation ? 1 : -1);
}

}  // namespace

LoopbackTransport::LoopbackTransport(std::shared_ptr<LoopbackHub> hub, const RankProgram& program,
                                     double timeout_seconds)
    : hub_(std::move(hub)),
      program_(program),
      timeout_seconds_(timeout_seconds),
      specs_(program.size()),
      receives_(program.num_slots()),
      sends_(program.num_sends()),
      broken_(num_ranks(program.channels())) {}

LoopbackTransport::~LoopbackTransport() {
  leave("the rank has left in the middle of a step");
}

void LoopbackTransport::begin_step(std::int64_t signature, bool announce) {
  const auto broken = std::find(broken_.begin(), broken_.end(), true);
  if (broken != broken_.end()) {
    const auto peer = static_cast<std::int32_t>(broken - broken_.begin());
    throw TransportError(peer, "rank " + std::to_string(program_.rank()) + ": the loopback transport is broken (" +
                                   why_broken_ + "); build the Pipeline again");
  }
  specs_.open(signature, announce);
}

LoopbackOperation& LoopbackTransport::prepare(LoopbackOperation& operation, const Transfer& transfer,
                                              bool is_send) const {
  operation = LoopbackOperation{};
  operation.is_send = is_send;
  operation.channel = transfer.channel;
  operation.stage = consumer(transfer, program_.channels()[transfer.channel].kind, is_send);
  operation.microbatch = transfer.microbatch;
  return operation;
}

void LoopbackTransport::post_receive(const Transfer& transfer, std::int32_t slot, Payload& into) {
  LoopbackOperation& operation = prepare(receives_[slot], transfer, false);
  operation.target = &into;
  post(operation);
}

void LoopbackTransport::post_send(const Transfer& transfer, std::int32_t send, const Payload& from) {
  if (specs_.announcing()) {
    specs_.learn(transfer.position, from.spec());
  } else if (!specs_.fits(transfer.position, from)) {
    specs_.refuse(transfer.position, from, program_.place(transfer.position));
  }
  LoopbackOperation& operation = prepare(sends_[send], transfer, true);
  operation.source = &from;
  post(operation);
}

void LoopbackTransport::post_stand_in(const Transfer& transfer, std::int32_t send) {
  post(prepare(sends_[send], transfer, true));
}

void LoopbackTransport::post(LoopbackOperation& operation) {
  const std::int32_t peer = peer_of(operation);
  if (broken_[peer]) return;
  if (operation.is_send && hub_->delay() > Clock::duration::zero()) operation.eligible = Clock::now() + hub_->delay();
  operation.posted = true;
  const int end = program_.rank() < peer ? 0 : 1;
  if (!hub_->lane_of(operation.channel).post(end, operation)) give_up(operation);
}

bool LoopbackTransport::wait_receive(std::int32_t slot) {
  LoopbackOperation& operation = receives_[slot];
  if (!wait(operation)) return false;
  if (operation.error) std::rethrow_exception(std::exchange(operation.error, nullptr));
  return !operation.stand_in;
}

double LoopbackTransport::wait_send(std::int32_t send) {
  LoopbackOperation& operation = sends_[send];
  return wait(operation) ? operation.completed : 0;
}

bool LoopbackTransport::wait(LoopbackOperation& operation) {
  // Not posted since the peer is broken, or waited for before (an error's second wait, while draining).
  if (!operation.posted || broken_[peer_of(operation)]) return false;
  const Clock::time_point deadline = Clock::now() + as_duration(timeout_seconds_);
  if (!hub_->lane_of(operation.channel).wait(operation, deadline)) give_up(operation);
  operation.posted = false;
  return true;
}

std::int32_t LoopbackTransport::peer_of(const LoopbackOperation& operation) const {
  return program_.channels()[operation.channel].peer_of(program_.rank());
}

void LoopbackTransport::break_off(std::int32_t peer, const std::string& why) {
  broken_[peer] = true;
  why_broken_ = why;
  hub_->break_off(program_.rank(), peer, why);
}

void LoopbackTransport::give_up(LoopbackOperation& operation) {
  const std::int32_t peer = peer_of(operation);
  break_off(peer, hub_->lane_of(operation.channel).why_broken());
  operation.posted = false;
  throw TransportError(peer, "rank " + std::to_string(program_.rank()) + ": no transfer with rank " +
                                 std::to_string(peer) + " any more (" + why_broken_ +
                                 "); see what that rank was doing, or set a longer timeout");
}

void LoopbackTransport::end_step(bool complete) {
  specs_.close(complete);
  const bool was_broken = !why_broken_.empty();
  if (!leave("a channel is not empty at the end of the step") && !was_broken) {
    throw Error("rank " + std::to_string(program_.rank()) +
                ": a channel is not empty at the end of the step; lower the schedule again and validate it");
  }
}

bool LoopbackTransport::leave(const char* why) {
  bool idle = true;
  for (std::vector<LoopbackOperation>* operations : {&receives_, &sends_}) {
    for (LoopbackOperation& operation : *operations) {
      if (!operation.posted) continue;
      idle = false;
      if (!broken_[peer_of(operation)]) break_off(peer_of(operation), why);
      operation = {};
    }
  }
  return idle;
}

}  // namespace fastpipe
