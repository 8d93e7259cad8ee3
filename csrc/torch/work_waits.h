// Waits of the host for messages of c10d, which another thread can end.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace fastpipe {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// A rank that is not known, as in a TransportError; none.
constexpr std::int32_t kUnknownRank = -1;
constexpr std::int32_t kNoRank = -2;

// Whether a rank is lost, and the wait of the one thread that waits. Work::abort() of Gloo's sends and receives ends
// one wait, whether it has begun or not; the message may come all the same, and can be waited for again. So a wait is
// ended now and then, in order that Python can handle signals; and for good when any rank is lost, as then no step can
// be completed.
class WorkWaits final {
 public:
  WorkWaits() = default;
  WorkWaits(const WorkWaits&) = delete;
  WorkWaits& operator=(const WorkWaits&) = delete;
  // Not in a forked child, which has no thread to wait for (fastpipe/runtime/common/guards.py).
  ~WorkWaits();

  // From any thread: a rank is gone, or one that is not known; nothing is waited for any more.
  void lose(std::int32_t rank);
  // The first one; kNoRank while there is none.
  std::int32_t lost() const { return lost_; }
  // Without the GIL. Throws what Work::wait throws, Error when a rank is lost, and what a handler of a signal raises.
  void wait(const WorkPtr& work, std::chrono::milliseconds timeout);

 private:
  bool wait_once(c10d::Work& work, std::chrono::milliseconds timeout);
  void end_wait() const;
  // Its thread's: ends a wait that it finds twice.
  void tick();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<std::int32_t> lost_{kNoRank};
  c10d::Work* current_ = nullptr;  // what is waited for
  std::uint64_t number_ = 0;       // of waits so far
  bool sleeps_ = true;             // the thread, until there is another wait
  bool ends_ = false;
  std::thread ticker_;  // made by the first wait
};

}  // namespace fastpipe
