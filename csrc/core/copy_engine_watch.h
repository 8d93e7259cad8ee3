// Sees to it that no stream waits for good: a thread that looks at the flags which streams wait for, and never calls
// the device.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "clock.h"
#include "copy_engine_layout.h"
#include "home.h"
#include "shared_memory_peer.h"

namespace fastpipe {

class CopyWatch final {
 public:
  // What one queue waits for, again and again, of one peer.
  class Line final {
   public:
    Line(SharedWord& flag, SharedWord& given_up, std::shared_ptr<SharedMemoryPeer> peer)
        : flag_(flag), given_up_(given_up), peer_(std::move(peer)) {}
    // By the rank's thread, before the queue gets the wait.
    void expect(std::uint32_t value) { expected_.store(value, std::memory_order_relaxed); }

   private:
    friend class CopyWatch;
    bool waits() const { return !has_come(flag_.load(), expected_.load(std::memory_order_relaxed)); }

    SharedWord& flag_;
    SharedWord& given_up_;
    const std::shared_ptr<SharedMemoryPeer> peer_;
    std::atomic<std::uint32_t> expected_{0};
    // The watch's own.
    std::uint32_t seen_ = 0;
    Clock::time_point since_{};  // of the last progress; zero: it waits for nothing
    Clock::time_point dead_{};   // the first look at which the peer was dead; zero: it lives, as far as is known
  };

  // let_go: this rank's word for all others, of LinkBoard. It must outlive the watch.
  CopyWatch(double timeout_seconds, SharedWord& let_go);
  CopyWatch(const CopyWatch&) = delete;
  CopyWatch& operator=(const CopyWatch&) = delete;
  // In a forked child there is no thread, and nothing is done.
  ~CopyWatch();

  // The memory of the flags must outlive the watch.
  Line& add(SharedWord& flag, SharedWord& given_up, std::shared_ptr<SharedMemoryPeer> peer);
  // Whether any queue waits for a peer. A released one does not.
  bool waiting();
  // From any thread: releases what waits for the peer, now and from now on; all others see that this is so, and that it
  // is because of `blamed`.
  void give_up(std::int32_t peer, const std::string& why, std::int32_t blamed);
  bool broken(std::int32_t peer) const;
  bool any_broken() const { return any_broken_.load(); }
  // The first that was given up, and why.
  std::int32_t first_broken() const;
  std::string why() const;

 private:
  void work();
  void look(Line& line, Clock::time_point now);
  void release();
  void give_up_locked(std::int32_t peer, const std::string& why, std::int32_t blamed);
  bool broken_locked(std::int32_t peer) const;

  const Home home_;
  const double timeout_seconds_;
  SharedWord& let_go_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Line> lines_;  // which stay where they are
  std::vector<std::int32_t> broken_;
  std::string why_;
  std::atomic<bool> any_broken_{false};
  bool ending_ = false;
  std::unique_ptr<std::thread> thread_;
};

}  // namespace fastpipe
