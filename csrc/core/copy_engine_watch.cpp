#include "copy_engine_watch.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace fastpipe {

namespace {

constexpr std::chrono::milliseconds kSlice{50};

}  // namespace

CopyWatch::CopyWatch(double timeout_seconds)
    : timeout_seconds_(timeout_seconds), thread_(std::make_unique<std::thread>([this] { work(); })) {}

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

void CopyWatch::give_up(std::int32_t peer, const std::string& why) {
  const std::lock_guard<std::mutex> lock(mutex_);
  give_up_locked(peer, why);
}

void CopyWatch::give_up_locked(std::int32_t peer, const std::string& why) {
  if (broken_locked(peer)) return;
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
  const std::uint32_t flag = line.flag_.load();
  if (!line.waits()) {
    line.since_ = {};
    return;
  }
  if (line.since_ == Clock::time_point{} || line.seen_ != flag) line.since_ = now;
  line.seen_ = flag;
  if (!alive) return give_up_locked(peer, "its process died");
  if (given_up) return give_up_locked(peer, "it has given up this rank");
  if (now - line.since_ < as_duration(timeout_seconds_)) return;
  give_up_locked(peer, "nothing came of it in " + std::to_string(timeout_seconds_) + " s");
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
