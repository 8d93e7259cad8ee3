// A thread that does one job at a time for another thread.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

namespace fastpipe {

class Helper {
 public:
  Helper() : thread_([this] { work(); }) {}
  Helper(const Helper&) = delete;
  Helper& operator=(const Helper&) = delete;
  ~Helper();

  // Until finish() has returned, the job and what it works with must stay.
  void start(std::function<void()> job);
  // Waits for the job; what it threw.
  std::exception_ptr finish();

 private:
  enum class State { kIdle, kGiven, kDone, kEnding };

  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::kIdle;
  std::function<void()> job_;
  std::exception_ptr error_;
  std::thread thread_;  // last: it uses the others
};

}  // namespace fastpipe
