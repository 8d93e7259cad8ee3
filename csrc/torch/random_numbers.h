// Torch's default generators while backwards run: which exclude other actions of the process, and which recompute.
// fastpipe/runtime/stage/random_numbers.py says why, decides, and guards the forwards.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "torch_private.h"

namespace fastpipe {

// One for the process, as the generators are. It knows whether the thread that asks holds it.
class GeneratorsMutex {
 public:
  static GeneratorsMutex& get() {
    static GeneratorsMutex mutex;
    return mutex;
  }

  void lock() {
    mutex_.lock();
    held_here() = true;
  }

  void unlock() {
    held_here() = false;
    mutex_.unlock();
  }

  static bool& held_here() {
    thread_local bool held = false;
    return held;
  }

 private:
  std::mutex mutex_;
};

// Of one step. Several ranks of a process share it; only `recomputed` changes while they run.
struct RngGuard {
  bool exclusive = false;
  bool recomputes = false;  // as far as is known
  std::atomic<bool> recomputed{false};
};

// Around one B, I or W of a stage, in the thread that runs it. Does nothing where `guard` is null.
class BackwardRegion {
 public:
  enum class Kind { kBackward, kWeight };

  BackwardRegion(RngGuard* guard, Kind kind) : guard_(guard), kind_(kind) {
    if (guard == nullptr) return;
    if (guard->exclusive) lock_ = std::unique_lock<GeneratorsMutex>(GeneratorsMutex::get());
    sequence_ = count_nodes();
  }
  BackwardRegion(const BackwardRegion&) = delete;
  BackwardRegion& operator=(const BackwardRegion&) = delete;
  ~BackwardRegion() {
    // A backward makes no nodes of autograd, but for those of what it recomputes. W has one that starts it.
    if (guard_ == nullptr || kind_ == Kind::kWeight || count_nodes() == sequence_) return;
    guard_->recomputed.store(true, std::memory_order_relaxed);
  }

 private:
  RngGuard* guard_;
  Kind kind_;
  std::unique_lock<GeneratorsMutex> lock_;
  std::uint64_t sequence_ = 0;
};

}  // namespace fastpipe
