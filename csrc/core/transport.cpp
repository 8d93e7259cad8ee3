#include "transport.h"

#include <utility>

#include "common.h"

namespace fastpipe {

namespace {

std::string no_transfer(std::int32_t peer) {
  return peer < 0 ? "no transfer" : "no transfer with rank " + std::to_string(peer);
}

}  // namespace

void BrokenPeers::add(std::int32_t peer, const std::string& why) {
  if (has(peer)) return;
  if (!any()) why_ = why;
  peers_.push_back(peer);
}

void BrokenPeers::add_all(const std::string& why) {
  if (!any()) why_ = why;
  all_ = true;
}

void BrokenPeers::require_none() const {
  if (!any()) return;
  throw TransportError(first(), "rank " + std::to_string(rank_) + ": the transport is broken (" + no_transfer(first()) +
                                    ": " + why_ + "); build the Pipeline again");
}

void BrokenPeers::refuse_undrained() const {
  throw Error("rank " + std::to_string(rank_) +
              ": a channel is not empty at the end of the step; lower the schedule again and validate it");
}

void BrokenPeers::refuse(std::int32_t peer, const std::string& place, const std::string& why) {
  throw TransportError(peer, place + ": " + no_transfer(peer) + " any more (" + why +
                                 "); see what that rank was doing, or set a longer timeout");
}

void SpecBook::open(std::int64_t signature, bool announce) {
  const auto found = pages_.find(signature);
  if (!announce && found == pages_.end()) {
    throw ArgumentError("no step with the input signature " + std::to_string(signature) +
                        " has been announced to this executor; run one with announce=True first");
  }
  if (announce) {
    draft_.clear();
    draft_.resize(size_);
  }
  page_ = announce ? &draft_ : &found->second;
  signature_ = signature;
  announcing_ = announce;
}

void SpecBook::learn(std::size_t position, std::unique_ptr<Spec> spec) {
  (*page_)[position] = std::move(spec);
}

const Spec& SpecBook::at(std::size_t position) const {
  const std::unique_ptr<Spec>& spec = (*page_)[position];
  if (!spec) {
    throw Error("nothing was announced for instruction " + std::to_string(position) + "; this is a bug in fastpipe");
  }
  return *spec;
}

void SpecBook::learn_or_check(std::size_t position, const Payload& payload, const RankProgram& program) {
  if (announcing_) return learn(position, payload.spec());
  if (payload.matches(at(position))) return;
  throw ArgumentError(
      program.place(position) + ": expected " + at(position).text() + ", as in the first step with this input, found " +
      payload.spec()->text() +
      "; what a stage sends may change only together with the step's input: pad it to one shape, let it always or "
      "never require a gradient, or cut the model so that who makes it and who takes it are in one stage");
}

void SpecBook::close(bool complete) {
  if (announcing_ && complete) pages_[signature_] = std::move(draft_);
  page_ = nullptr;
  announcing_ = false;
}

}  // namespace fastpipe
