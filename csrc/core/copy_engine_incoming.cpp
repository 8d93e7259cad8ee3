#include "copy_engine_incoming.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "errors.h"

namespace fastpipe {

CopyIncoming::CopyIncoming(std::shared_ptr<CopyEngineLink> link, const CopyPlaces& places,
                           std::shared_ptr<SharedMemorySegment> segment, CopyWords& words, const Channel& channel,
                           CopyWatch& watch)
    : link_(std::move(link)),
      channel_(places),
      segment_(std::move(segment)),
      words_(words),
      peer_(channel.source),
      line_(watch.add(words.arrived, words.given_up, link_->host()->peer(peer_))),
      queue_(link_->queue(channel)),
      granted_(link_->engine()->make_mark()),
      waited_(link_->engine()->make_mark()) {
  for (std::int32_t place = 0; place < channel_.count; ++place) {
    places_.push_back(std::make_shared<CopyPlace>(link_->engine()->make_mark()));
  }
}

CopyIncoming::~CopyIncoming() {
  words_.given_up.store(1);
  for (auto& memory : memories_) link_->bury(std::move(memory), segment_, words_, peer_);
}

void CopyIncoming::prepare(std::size_t bytes) {
  if (bytes <= place_bytes_) return;
  // Twice the last, so that messages that grow bit by bit do not leave one memory each behind.
  const std::size_t size = whole_blocks(std::max(bytes, 2 * place_bytes_));
  try {
    memories_.push_back(link_->engine()->allocate(size * places_.size()));
    words_.ticket = link_->engine()->ticket(*memories_.back());
  } catch (...) {
    words_.refused.store(1);
    throw;
  }
  place_bytes_ = size;
  words_.place_bytes.store(size);
}

std::uint64_t CopyIncoming::post() {
  const std::uint64_t message = posted_++;
  const CopyPlace& place = *places_[channel_.of(message)];
  if (place.lent) throw Error("a receive is posted into a slot that was not freed; lower the schedule again");
  queue_.wait(*place.unused);
  queue_.write(words_.granted, static_cast<std::uint32_t>(message + 1));
  queue_.record(*granted_);
  return message;
}

CopyLoan CopyIncoming::take(std::uint64_t message) {
  const auto count = static_cast<std::uint32_t>(message + 1);
  line_.expect(count);
  CopyQueue& current = link_->engine()->current();
  current.wait(words_.arrived, count);
  current.record(*waited_);
  if (is_stand_in(message)) return {};
  const std::int32_t place = channel_.of(message);
  return {link_->engine(), places_[place], memories_.back(), memories_.back()->data() + place * place_bytes_};
}

bool CopyIncoming::holds(const std::byte* data) const {
  const std::less<const std::byte*> before;
  return std::any_of(memories_.begin(), memories_.end(), [&](const auto& memory) {
    return !before(data, memory->data()) && before(data, memory->data() + memory->size());
  });
}

// After the first of a step all are. A device's queue comes to it after the host, which then only may have seen it.
bool CopyIncoming::is_stand_in(std::uint64_t message) const {
  const std::uint64_t first = words_.stand_ins.load();
  return first != 0 && first - 1 <= message && channel_.step_of(first - 1) == channel_.step_of(message);
}

}  // namespace fastpipe
