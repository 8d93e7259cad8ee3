#include "shared_memory_exchange.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common.h"

namespace fastpipe {

void SharedMemoryExchange::connect(std::int32_t rank, const PublishedAddress& address) {
  peers_.at(rank).emplace(rank, address, sizeof(ExchangeWords), ExchangeWords::kMagic);
}

void SharedMemoryExchange::post(std::string_view message) {
  messages_.assign(peers_.size(), std::nullopt);
  messages_[rank_] = message;
  collected_ = false;
  large_ = message.size() > kExchangeBytes ? SharedMemorySegment::make(message.size()) : nullptr;
  if (large_) std::memcpy(large_->data(), message.data(), message.size());
  write(message, large_ ? large_->descriptor() : -1);
}

void SharedMemoryExchange::write(std::string_view message, int descriptor) {
  ExchangeMessage& place = words().messages[++number_ % 2];
  place.bytes = message.size();
  place.descriptor = descriptor;
  if (descriptor < 0) std::memcpy(place.inline_bytes, message.data(), message.size());
  words().posted.store(number_);
  for (const auto& peer : peers_) {
    if (peer) peer->wakeup().notify(for_rank(rank_));
  }
}

bool SharedMemoryExchange::wait(double seconds) {
  const Clock::time_point deadline = Clock::now() + as_duration(seconds);
  if (!wait_for_all(deadline)) return false;
  if (!std::exchange(collected_, true) && collect()) write("", -1);
  return wait_for_all(deadline);
}

bool SharedMemoryExchange::wait_for_all(Clock::time_point deadline) {
  for (auto& peer : peers_) {
    if (peer && !wait_for(*peer, deadline)) return false;
  }
  return true;
}

bool SharedMemoryExchange::wait_for(const SharedMemoryPeer& peer, Clock::time_point deadline) {
  const auto look = [&] { return arrived(peer); };
  if (dead_[peer.rank()] || comes_true_soon(spin_, look)) return true;
  SharedMemoryWakeup& wakeup = words().wakeup;
  while (true) {
    const auto waited = wakeup.wait(for_rank(peer.rank()), look);
    if (waited == SharedMemoryWakeup::Waited::kNot) return true;
    // Asked before the last look, as what it posted before it died counts.
    const bool alive = waited == SharedMemoryWakeup::Waited::kUntilWoken || peer.alive();
    if (arrived(peer)) return true;
    dead_[peer.rank()] = !alive;
    if (!alive) return true;
    if (Clock::now() >= deadline) return false;
  }
}

std::vector<std::int32_t> SharedMemoryExchange::missing() const {
  std::vector<std::int32_t> ranks;
  for (const auto& peer : peers_) {
    if (peer && !arrived(*peer) && peer->alive()) ranks.push_back(peer->rank());
  }
  return ranks;
}

bool SharedMemoryExchange::collect() {
  bool large = large_ != nullptr;
  for (const auto& peer : peers_) {
    if (!peer || !arrived(*peer)) continue;
    const ExchangeMessage& message = peer->words<ExchangeWords>().messages[number_ % 2];
    large = large || message.descriptor >= 0;
    messages_[peer->rank()] = read(*peer, message);
    if (peer->words<ExchangeWords>().posted.load() > number_ + 1) {
      throw Error("rank " + std::to_string(peer->rank()) + " has continued without rank " + std::to_string(rank_) +
                  "; build the Pipeline again after an aborted step");
    }
  }
  return large;
}

std::optional<std::string> SharedMemoryExchange::read(const SharedMemoryPeer& peer, const ExchangeMessage& message) {
  const std::size_t bytes = message.bytes;
  if (message.descriptor < 0) {
    return std::string(reinterpret_cast<const char*>(message.inline_bytes), std::min(bytes, kExchangeBytes));
  }
  try {
    const auto large = peer.open(message.descriptor, bytes);
    return std::string(reinterpret_cast<const char*>(large->data()), bytes);
  } catch (const Error&) {
    if (peer.alive()) throw;
    return std::nullopt;  // it went with its process
  }
}

}  // namespace fastpipe
