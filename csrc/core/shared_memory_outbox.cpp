#include "shared_memory_outbox.h"

#include <utility>

#include "clock.h"

namespace fastpipe {

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
