#include "copy_engine_outgoing.h"

#include <utility>

#include "errors.h"

namespace fastpipe {

CopyOutgoing::CopyOutgoing(std::shared_ptr<CopyEngineLink> link, const CopyPlaces& places, const Channel& channel)
    : link_(std::move(link)),
      channel_(places),
      peer_(channel.destination),
      queue_(link_->queue(channel)),
      made_(link_->engine()->make_mark()),
      last_(link_->engine()->make_mark()) {}

CopyOutgoing::~CopyOutgoing() {
  memories_.clear();
  if (words_ == nullptr) return;
  words_->given_up.store(1);
  words_->closed.store(1);
}

void CopyOutgoing::open(CopyWords& words, CopyWatch& watch) {
  words_ = &words;
  line_ = &watch.add(words.granted, words.given_up, link_->host()->peer(peer_));
}

bool CopyOutgoing::prepare(std::size_t bytes) {
  if (bytes <= place_bytes_) return true;
  const std::uint64_t shown = words_->place_bytes.load();
  if (shown >= bytes) {
    memories_.push_back(link_->engine()->open(words_->ticket));
    place_bytes_ = shown;
    return true;
  }
  if (words_->given_up.load() != 0) throw Error("it has given up this rank");
  if (words_->refused.load() == 0) return false;
  throw Error("it has no memory on its device for " + std::to_string(channel_.count) + " messages of " +
              std::to_string(bytes) + " bytes");
}

void CopyOutgoing::send(const std::vector<CopyPart>& parts, CopyMark& copied) {
  link_->engine()->current().record(*made_);
  queue_.wait(*made_);
  std::byte* to = begin();
  for (const CopyPart& part : parts) {
    if (part.bytes > 0) queue_.copy(to, part.data, part.bytes);
    to += whole_blocks(part.bytes);
  }
  end(copied);
}

void CopyOutgoing::stand_in(std::size_t bytes, CopyMark& copied) {
  const std::uint64_t first = words_->stand_ins.load();
  const bool is_first = first == 0 || channel_.step_of(first - 1) != channel_.step_of(sent_);
  if (is_first) words_->stand_ins.store(sent_ + 1);
  std::byte* const to = begin();
  if (bytes > 0) queue_.zero(to, bytes);
  end(copied);
}

std::byte* CopyOutgoing::begin() {
  const auto count = static_cast<std::uint32_t>(sent_ + 1);
  line_->expect(count);
  queue_.wait(words_->granted, count);
  return memories_.back()->data() + channel_.of(sent_) * place_bytes_;
}

void CopyOutgoing::end(CopyMark& copied) {
  queue_.write(words_->arrived, static_cast<std::uint32_t>(++sent_));
  queue_.record(copied);
  queue_.record(*last_);
}

}  // namespace fastpipe
