#include "shared_memory_inbox.h"

#include <string>
#include <utility>

#include "errors.h"

namespace fastpipe {

namespace {

void require(bool holds) {
  if (holds) return;
  throw Error("shared memory: what was received makes no sense; run the same version of fastpipe on every rank");
}

}  // namespace

SharedMemoryInbox::SharedMemoryInbox(std::int32_t channel, std::shared_ptr<SharedMemoryPeer> peer, std::size_t program,
                                     std::uint64_t fingerprint)
    : channel_(channel), peer_(std::move(peer)), program_(program), fingerprint_(fingerprint) {}

bool SharedMemoryInbox::arrived() {
  return (ring_ != nullptr || open()) && ring_->sent.load() > taken_;
}

bool SharedMemoryInbox::open() {
  auto rings = peer_->rings(program_, fingerprint_);
  if (!rings) return false;
  const std::uint64_t offset = rings->at<std::uint64_t>(0)[channel_];
  require(offset > 0 && offset + sizeof(RingWords) <= rings->size());
  ring_ = rings->at<RingWords>(offset);
  require(offset + sizeof(RingWords) + ring_->num_entries * sizeof(RingEntry) <= rings->size());
  sender_ = std::make_shared<CellSender>(CellSender{std::move(rings), ring_, peer_});
  return true;
}

SharedMemoryMail SharedMemoryInbox::take() {
  const RingEntry entry = reinterpret_cast<const RingEntry*>(ring_ + 1)[taken_ % ring_->num_entries];
  SharedMemoryMail mail;
  mail.stage = entry.stage;
  mail.microbatch = entry.microbatch;
  mail.stand_in = entry.stand_in != 0;
  if (!mail.stand_in) open_mail(entry, mail);
  ++taken_;
  ring_->taken.store(taken_);
  sender_->make_known();
  return mail;
}

void SharedMemoryInbox::open_mail(const RingEntry& entry, SharedMemoryMail& mail) {
  const auto& segment = segment_of(entry);
  const std::uint64_t begin = entry.offset + sizeof(CellWords);
  require(begin <= segment->size() && entry.bytes <= segment->size() - begin);
  CellWords& cell = *segment->at<CellWords>(entry.offset);
  mail.bytes = {segment->data() + begin, entry.bytes, entry.announced != 0};
  mail.lease = SharedMemoryLease(sender_, segment, cell);
  mail.watch = SharedMemoryWatch(sender_, segment, cell);
}

const std::shared_ptr<SharedMemorySegment>& SharedMemoryInbox::segment_of(const RingEntry& entry) {
  auto found = segments_.find(entry.segment);
  if (found == segments_.end()) {
    auto opened = peer_->open(entry.descriptor, entry.segment_bytes);
    sweep();
    found = segments_.emplace(entry.segment, std::move(opened)).first;
  }
  return found->second;
}

// Tensors that are still in what the sender has retired keep it.
void SharedMemoryInbox::sweep() {
  for (auto it = segments_.begin(); it != segments_.end();) {
    const bool retired = it->second->at<CellSegmentWords>(0)->retired.load() != 0;
    it = retired ? segments_.erase(it) : std::next(it);
  }
}

}  // namespace fastpipe
