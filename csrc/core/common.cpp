#include "common.h"

#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

namespace fastpipe {

class Helper::Thread final {
 public:
  Thread() : thread_([this] { work(); }) {}
  Thread(const Thread&) = delete;
  Thread& operator=(const Thread&) = delete;

  ~Thread() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      state_ = State::kEnding;
    }
    changed_.notify_all();
    thread_.join();
  }

  void start(FunctionRef<void()> job) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      job_ = job;
      state_ = State::kGiven;
    }
    changed_.notify_all();
  }

  std::exception_ptr finish() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return state_ == State::kDone; });
    state_ = State::kIdle;
    return std::exchange(error_, nullptr);
  }

 private:
  enum class State { kIdle, kGiven, kDone, kEnding };

  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return state_ == State::kGiven || state_ == State::kEnding; });
      if (state_ == State::kEnding) return;
      const FunctionRef<void()> job = *job_;
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

  std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::kIdle;
  std::optional<FunctionRef<void()>> job_;
  std::exception_ptr error_;
  std::thread thread_;  // last: it uses the others
};

Helper::Helper() : thread_(std::make_unique<Thread>()) {}

Helper::~Helper() {
  if (!fork_guard_.same_process()) static_cast<void>(thread_.release());
}

void Helper::start(FunctionRef<void()> job) {
  thread_->start(job);
}

std::exception_ptr Helper::finish() {
  return thread_->finish();
}

}  // namespace fastpipe
