#include "shared_ring.h"

#include <unistd.h>

#include <algorithm>
#include <string>
#include <utility>

#include "common.h"

namespace fastpipe {

SharedMemoryLease::SharedMemoryLease(std::shared_ptr<const CellSender> sender,
                                     std::shared_ptr<SharedMemorySegment> segment, CellWords& cell)
    : sender_(std::move(sender)), segment_(std::move(segment)), cell_(&cell), process_(::getpid()) {}

void SharedMemoryLease::swap(SharedMemoryLease& other) noexcept {
  sender_.swap(other.sender_);
  segment_.swap(other.segment_);
  std::swap(cell_, other.cell_);
  std::swap(process_, other.process_);
}

SharedMemoryLease::~SharedMemoryLease() {
  // A forked process (a data loader's, say) has copies of the tensors and shares their memory: it must not free it.
  if (cell_ == nullptr || ::getpid() != process_) return;
  cell_->state.store(kCellFree);
  sender_->make_known();
}

void SharedMemoryWatch::end() {
  CellWords* const cell = std::exchange(cell_, nullptr);
  std::uint64_t expected = used_;
  // It fails when the cell is free, or has the next message already, whose number differs.
  if (cell != nullptr && cell->state.compare_exchange_strong(expected, used_ | kHeldMark)) sender_->make_known();
  segment_.reset();
  sender_.reset();
}

namespace {

// So many messages more than the receiver asks for, so that the sender can run ahead while it computes; of small ones
// as many as a step has.
constexpr std::size_t kAhead = 2;
constexpr std::size_t kSmallBytes = std::size_t{1} << 20;

}  // namespace

bool SharedMemoryCells::Part::idle() const {
  for (std::size_t cell = 0; cell < num_cells; ++cell) {
    if (words(cell).state.load() != kCellFree) return false;
  }
  return true;
}

SharedMemoryCell SharedMemoryCells::find(std::size_t bytes) {
  std::size_t usable = 0;
  for (const Part& part : parts_) {
    if (part.capacity < bytes || part.retired()) continue;
    // The first that is free: few cells are touched, and these stay in the cache.
    for (std::size_t cell = 0; cell < part.num_cells; ++cell) {
      const std::uint64_t state = part.words(cell).state.load();
      if (state == kCellFree) return cell_of(part, cell);
      if ((state & kHeldMark) == 0) ++usable;
    }
  }
  const std::size_t enough = wanted(bytes);
  if (usable >= enough) return {};
  grow(bytes, enough - usable);
  return cell_of(parts_.back(), 0);
}

std::size_t SharedMemoryCells::wanted(std::size_t bytes) const {
  const std::size_t small = std::min<std::size_t>(num_messages_, kSmallBytes / std::max<std::size_t>(bytes, 1));
  return std::max<std::size_t>(slots_ + kAhead, small);
}

SharedMemoryCell SharedMemoryCells::cell_of(const Part& part, std::size_t index) const {
  const std::size_t offset = part.offset(index);
  return {&part.words(index),
          part.memory->data() + offset + sizeof(CellWords),
          part.number,
          offset,
          part.memory->descriptor(),
          part.memory->size()};
}

void SharedMemoryCells::grow(std::size_t bytes, std::size_t num_cells) {
  std::size_t largest = 0;
  for (const Part& part : parts_) largest = std::max(largest, part.capacity);
  // Twice the last, so that messages that grow bit by bit do not leave one segment each behind.
  const std::size_t capacity = whole_lines(bytes > largest ? std::max(bytes, 2 * largest) : largest);
  Part part{nullptr, num_parts_ + 1, std::max(capacity, kSharedLine), num_cells};
  part.memory = SharedMemorySegment::make(part.offset(num_cells));
  retire_below(part.capacity);
  parts_.push_back(std::move(part));
  ++num_parts_;
}

void SharedMemoryCells::retire_below(std::size_t capacity) {
  for (const Part& part : parts_) {
    if (part.capacity < capacity) part.memory->at<CellSegmentWords>(0)->retired.store(1);
  }
}

void SharedMemoryCells::sweep() {
  const auto done = [](const Part& part) { return part.retired() && part.idle(); };
  parts_.erase(std::remove_if(parts_.begin(), parts_.end(), done), parts_.end());
}

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

SharedMemoryOutbox::SharedMemoryOutbox(const Codec& codec, std::int32_t channel, RingWords& ring,
                                       std::uint64_t num_entries, SharedMemoryCells cells,
                                       std::shared_ptr<SharedMemoryPeer> peer)
    : codec_(codec),
      channel_(channel),
      ring_(ring),
      entries_(reinterpret_cast<RingEntry*>(&ring + 1)),
      cells_(std::move(cells)),
      peer_(std::move(peer)) {
  ring_.num_entries = num_entries;
}

void SharedMemoryOutbox::post(SharedMemorySend& send) {
  if (queue_.empty() && copy(send)) return;
  send.state = SharedMemorySend::State::kPosted;
  queue_.push_back(&send);
}

bool SharedMemoryOutbox::advance() {
  while (!queue_.empty()) {
    SharedMemorySend& send = *queue_.front();
    try {
      if (!copy(send)) {
        // Said before the last look: whoever makes room after that look sees it and rings.
        if (ring_.starved.load(std::memory_order_relaxed) != 0) return false;
        ring_.starved.store(1);
        continue;
      }
    } catch (...) {
      give_up_front();
      throw;
    }
    queue_.pop_front();
  }
  if (ring_.starved.load(std::memory_order_relaxed) != 0) ring_.starved.store(0, std::memory_order_relaxed);
  return true;
}

void SharedMemoryOutbox::give_up_front() {
  // No memory, say. The receiver must get something in its place; an entry needs none.
  SharedMemorySend& send = *queue_.front();
  send.from = nullptr;
  if (copy(send)) queue_.pop_front();
}

bool SharedMemoryOutbox::copy(SharedMemorySend& send) {
  if (sent_ - ring_.taken.load() >= ring_.num_entries) return false;
  RingEntry entry{};
  entry.stage = send.stage;
  entry.microbatch = send.microbatch;
  entry.stand_in = send.from == nullptr ? 1 : 0;
  entry.announced = send.announced ? 1 : 0;
  if (send.from != nullptr && !copy_payload(send, entry)) return false;
  publish(send, entry);
  return true;
}

bool SharedMemoryOutbox::copy_payload(const SharedMemorySend& send, RingEntry& entry) {
  entry.bytes = codec_.size(*send.from, send.announced);
  const SharedMemoryCell cell = cells_.find(entry.bytes);
  if (cell.words == nullptr) return false;
  codec_.write(*send.from, {cell.data, entry.bytes, send.announced});
  cell.words->state.store(used_cell(sent_), std::memory_order_relaxed);  // the receiver sees it when it sees `sent`
  entry.segment = cell.segment;
  entry.segment_bytes = cell.segment_bytes;
  entry.offset = cell.offset;
  entry.descriptor = cell.descriptor;
  return true;
}

void SharedMemoryOutbox::publish(SharedMemorySend& send, const RingEntry& entry) {
  entries_[sent_ % ring_.num_entries] = entry;
  ++sent_;
  ring_.sent.store(sent_);
  peer_->doorbell().ring(for_channel(channel_));
  send.state = SharedMemorySend::State::kCopied;
  send.completed = now_seconds();
}

}  // namespace fastpipe
