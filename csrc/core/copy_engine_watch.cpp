#include "copy_engine_watch.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace fastpipe {

namespace {

constexpr std::chrono::milliseconds kSlice{50};
// After a death is seen, in which every process hears of it: what its device has not done by then is given up
// (fastpipe/runtime/moments.py), and told as the death of that rank. Nobody trusts what comes of a queue that is let
// go, as LinkBoard says that it is; this is so that what was there before is known to be good.
constexpr std::chrono::milliseconds kMourning{250};

// Whom a peer holds to blame that has given up this rank: perhaps this rank.
std::int32_t blamed_by(const SharedMemoryPeer& peer) {
  const std::uint32_t word = peer.let_go();
  return word == 0 ? peer.rank() : static_cast<std::int32_t>(word) - 1;
}

}  // namespace

CopyWatch::CopyWatch(double timeout_seconds, SharedWord& let_go)
    : timeout_seconds_(timeout_seconds), let_go_(let_go), thread_(std::make_unique<std::thread>([this] { work(); })) {}

CopyWatch::~CopyWatch() {
  if (!home_.here()) {
    static_cast<void>(thread_.release());
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  thread_->join();
}

CopyWatch::Line& CopyWatch::add(SharedWord& flag, SharedWord& given_up, std::shared_ptr<SharedMemoryPeer> peer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return lines_.emplace_back(flag, given_up, std::move(peer));
}

bool CopyWatch::waiting() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(lines_.begin(), lines_.end(), [](const Line& line) { return line.waits(); });
}

void CopyWatch::give_up(std::int32_t peer, const std::string& why, std::int32_t blamed) {
  const std::lock_guard<std::mutex> lock(mutex_);
  give_up_locked(peer, why, blamed);
}

void CopyWatch::give_up_locked(std::int32_t peer, const std::string& why, std::int32_t blamed) {
  if (broken_locked(peer)) return;
  // Before anything is released: who has what came of it then sees this, on whatever way it came.
  std::uint32_t nobody = 0;
  let_go_.compare_exchange_strong(nobody, static_cast<std::uint32_t>(blamed) + 1);
  broken_.push_back(peer);
  if (why_.empty()) why_ = why;
  for (Line& line : lines_) {
    if (line.peer_->rank() == peer) line.given_up_.store(1);
  }
  any_broken_.store(true);
  release();
}

bool CopyWatch::broken(std::int32_t peer) const {
  if (!any_broken_.load()) return false;
  const std::lock_guard<std::mutex> lock(mutex_);
  return broken_locked(peer);
}

bool CopyWatch::broken_locked(std::int32_t peer) const {
  return std::find(broken_.begin(), broken_.end(), peer) != broken_.end();
}

std::int32_t CopyWatch::first_broken() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return broken_.empty() ? -1 : broken_.front();
}

std::string CopyWatch::why() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return why_;
}

void CopyWatch::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!ending_) {
    const Clock::time_point now = Clock::now();
    for (Line& line : lines_) look(line, now);
    release();
    changed_.wait_for(lock, kSlice);
  }
}

void CopyWatch::look(Line& line, Clock::time_point now) {
  const std::int32_t peer = line.peer_->rank();
  if (broken_locked(peer)) return;
  // Asked before the last look at the flag, for what it sent before it died counts.
  const bool alive = !line.waits() || line.peer_->alive();
  const bool given_up = line.given_up_.load() != 0;  // likewise
  if (alive) line.dead_ = {};
  if (!alive && line.dead_ == Clock::time_point{}) line.dead_ = now;
  const std::uint32_t flag = line.flag_.load();
  if (!line.waits()) {
    line.since_ = {};
    return;
  }
  if (line.since_ == Clock::time_point{} || line.seen_ != flag) line.since_ = now;
  line.seen_ = flag;
  if (!alive && now - line.dead_ > kMourning) return give_up_locked(peer, "its process died", peer);
  if (given_up) return give_up_locked(peer, "it has given up this rank", blamed_by(*line.peer_));
  if (now - line.since_ < as_duration(timeout_seconds_)) return;
  give_up_locked(peer, "nothing came of it in " + std::to_string(timeout_seconds_) + " s", peer);
}

// Every time, since what the peer had under way may set a flag back.
void CopyWatch::release() {
  if (broken_.empty()) return;
  for (Line& line : lines_) {
    if (!broken_locked(line.peer_->rank())) continue;
    // Also for what has not been expected yet, as a queue may get its wait at any time.
    line.flag_.store(line.expected_.load(std::memory_order_relaxed) + kFarAhead);
  }
}

}  // namespace fastpipe
