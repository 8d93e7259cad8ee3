// A thread that does one job at a time for another thread.
#pragma once

#include <exception>
#include <memory>

#include "function_ref.h"
#include "home.h"

namespace fastpipe {

class Helper {
 public:
  Helper();
  Helper(const Helper&) = delete;
  Helper& operator=(const Helper&) = delete;
  // In a forked child there is no thread, and what the two shared stays as the fork found it, locked perhaps: it is
  // left alone there, and never destroyed.
  ~Helper();

  // Until finish() has returned, the job and what it works with must stay.
  void start(FunctionRef<void()> job);
  // Waits for the job; what it threw.
  std::exception_ptr finish();

 private:
  class Thread;

  Home home_;
  std::unique_ptr<Thread> thread_;
};

}  // namespace fastpipe
