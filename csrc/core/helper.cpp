#include "helper.h"

#include <utility>

namespace fastpipe {

Helper::~Helper() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    state_ = State::kEnding;
  }
  changed_.notify_all();
  thread_.join();
}

void Helper::start(std::function<void()> job) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    job_ = std::move(job);
    state_ = State::kGiven;
  }
  changed_.notify_all();
}

std::exception_ptr Helper::finish() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return state_ == State::kDone; });
  state_ = State::kIdle;
  return std::exchange(error_, nullptr);
}

void Helper::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return state_ == State::kGiven || state_ == State::kEnding; });
    if (state_ == State::kEnding) return;
    const std::function<void()> job = std::exchange(job_, nullptr);
    lock.unlock();
    std::exception_ptr error;
    try {
      job();
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    error_ = std::move(error);
    state_ = State::kDone;
    changed_.notify_all();
  }
}

}  // namespace fastpipe
