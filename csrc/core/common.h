// What all of the core uses: errors, the clock, the process, callables, a queue, a thread that helps.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace fastpipe {

// What the core throws. Python sees ArgumentError as ValueError and the others as RuntimeError.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The caller's mistake: a program that names what is not there, a tensor that is not what was announced.
class ArgumentError final : public Error {
 public:
  using Error::Error;
};

// A peer that is dead, silent or out of step. What is under way with it can no longer be drained.
class TransportError final : public Error {
 public:
  // peer: less than 0 where it is not known which one.
  TransportError(std::int32_t peer, const std::string& message) : Error(message), peer_(peer) {}
  std::int32_t peer() const { return peer_; }

 private:
  std::int32_t peer_;
};

// The clock of all spans; on Linux the one that Python's time.perf_counter reads.
using Clock = std::chrono::steady_clock;

inline double seconds(Clock::time_point time) {
  return std::chrono::duration<double>(time.time_since_epoch()).count();
}

inline double now_seconds() {
  return seconds(Clock::now());
}

// A century at most, so that a deadline does not overflow.
inline Clock::duration as_duration(double seconds) {
  seconds = std::min(seconds, 3.2e9);
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

// The process in which something was made: a forked child has copies of what only its parent may destroy.
class ForkGuard final {
 public:
  bool same_process() const { return ::getpid() == process_; }

 private:
  const pid_t process_ = ::getpid();
};

// A callable that is lent for the length of a call: no copy, no memory.
template <typename Signature>
class FunctionRef;

template <typename Result, typename... Arguments>
class FunctionRef<Result(Arguments...)> final {
 public:
  template <typename Callable, typename = std::enable_if_t<!std::is_same_v<std::decay_t<Callable>, FunctionRef>>>
  FunctionRef(const Callable& callable)  // NOLINT: meant to be implicit
      : callable_(std::addressof(callable)), call_(&call<Callable>) {}

  Result operator()(Arguments... arguments) const { return call_(callable_, std::forward<Arguments>(arguments)...); }

 private:
  template <typename Callable>
  static Result call(const void* callable, Arguments... arguments) {
    return (*static_cast<const Callable*>(callable))(std::forward<Arguments>(arguments)...);
  }

  const void* callable_;
  Result (*call_)(const void*, Arguments...);
};

// A queue in a ring of memory that it keeps: once it is large enough, nothing is allocated.
template <typename Item>
class Fifo final {
 public:
  bool empty() const { return size_ == 0; }
  const Item& front() const { return items_[first_]; }

  void push_back(Item item) {
    if (size_ == items_.size()) grow();
    items_[(first_ + size_++) % items_.size()] = std::move(item);
  }
  void pop_front() {
    first_ = (first_ + 1) % items_.size();
    --size_;
  }
  void clear() { first_ = size_ = 0; }

 private:
  static constexpr std::size_t kAtFirst = 8;

  void grow() {
    std::vector<Item> larger(items_.empty() ? kAtFirst : 2 * items_.size());
    for (std::size_t i = 0; i < size_; ++i) larger[i] = std::move(items_[(first_ + i) % items_.size()]);
    items_ = std::move(larger);
    first_ = 0;
  }

  std::vector<Item> items_;
  std::size_t first_ = 0;
  std::size_t size_ = 0;
};

// A thread that does one job at a time for another thread.
class Helper {
 public:
  Helper();
  Helper(const Helper&) = delete;
  Helper& operator=(const Helper&) = delete;
  // In a forked child there is no thread, and what the two shared stays as the fork found it, perhaps locked: it is
  // never destroyed there.
  ~Helper();

  // Until finish() has returned, the job and what it works with must stay.
  void start(FunctionRef<void()> job);
  // Waits for the job; what it threw.
  std::exception_ptr finish();

 private:
  class Thread;

  ForkGuard fork_guard_;
  std::unique_ptr<Thread> thread_;
};

}  // namespace fastpipe
