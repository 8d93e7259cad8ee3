#include "work_waits.h"

#include <algorithm>
#include <string>

#include "core/common.h"
#include "python_errors.h"

namespace fastpipe {

namespace {

constexpr std::chrono::milliseconds kTick{100};

}  // namespace

WorkWaits::~WorkWaits() {
  if (!ticker_.joinable()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  ticker_.join();
}

void WorkWaits::lose(std::int32_t rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (lost_ == kNoRank) lost_ = rank;
  if (current_ != nullptr) end_wait();
}

void WorkWaits::wait(const WorkPtr& work, std::chrono::milliseconds timeout) {
  const Clock::time_point deadline = Clock::now() + timeout;
  auto left = timeout;
  while (!wait_once(*work, std::max(left, std::chrono::milliseconds{1}))) {
    check_signals();
    left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
  }
}

bool WorkWaits::wait_once(c10d::Work& work, std::chrono::milliseconds timeout) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (lost_ != kNoRank) throw Error(lost_ < 0 ? "a rank is gone" : "rank " + std::to_string(lost_) + " is gone");
    current_ = &work;
    ++number_;
    if (!ticker_.joinable()) ticker_ = std::thread([this] { tick(); });
    if (sleeps_) changed_.notify_all();
  }
  const auto done = [this] {
    const std::lock_guard<std::mutex> lock(mutex_);
    current_ = nullptr;
  };
  try {
    const bool arrived = work.wait(timeout);
    done();
    return arrived;
  } catch (...) {
    done();
    throw;
  }
}

void WorkWaits::end_wait() const {
  try {
    current_->abort();
  } catch (const std::exception&) {
    // A backend whose waits cannot be ended: its own timeout does it.
  }
}

void WorkWaits::tick() {
  std::unique_lock<std::mutex> lock(mutex_);
  std::uint64_t before = 0;
  while (!ends_) {
    sleeps_ = current_ == nullptr && number_ == before;
    if (sleeps_) {
      changed_.wait(lock, [this] { return ends_ || current_ != nullptr; });
      sleeps_ = false;
    }
    if (current_ != nullptr && number_ == before) end_wait();
    before = number_;
    changed_.wait_for(lock, kTick, [this] { return ends_; });
  }
}

}  // namespace fastpipe
