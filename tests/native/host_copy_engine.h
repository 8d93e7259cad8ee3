// A copy engine without a device: memory is the host's, queues are threads that take their time.
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

#include "core/copy_engine.h"

namespace fastpipe::testing {

class HostMemory final : public CopyMemory {
 public:
  explicit HostMemory(std::shared_ptr<SharedMemorySegment> segment) : segment_(std::move(segment)) {}
  std::byte* data() const override { return segment_->data(); }
  std::size_t size() const override { return segment_->size(); }
  const SharedMemorySegment& segment() const { return *segment_; }

 private:
  std::shared_ptr<SharedMemorySegment> segment_;
};

class HostMark : public CopyMark {
 public:
  // One recording: another one, in another queue, is another point.
  class Point final {
   public:
    void reach() {
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        reached_ = true;
      }
      changed_.notify_all();
    }
    bool reached() {
      const std::lock_guard<std::mutex> lock(mutex_);
      return reached_;
    }
    void wait() {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return reached_; });
    }

   private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool reached_ = false;
  };
  using PointPtr = std::shared_ptr<Point>;

  bool reached() const override { return !last_ || last_->reached(); }
  PointPtr record() { return last_ = std::make_shared<Point>(); }
  const PointPtr& last() const { return last_; }  // null: it was never recorded

 private:
  PointPtr last_;
};

inline void wait_for_flag(SharedWord& flag, std::uint32_t value) {
  while (static_cast<std::int32_t>(flag.load() - value) < 0) std::this_thread::sleep_for(std::chrono::microseconds(10));
}

// What the derived class does with a piece of work: at once, or later in a thread.
class HostQueue : public CopyQueue {
 public:
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) override {
    give([=] { std::memcpy(to, from, bytes); });
  }
  void zero(std::byte* to, std::size_t bytes) override {
    give([=] { std::memset(to, 0, bytes); });
  }
  void write(SharedWord& flag, std::uint32_t value) override {
    give([&flag, value] { flag.store(value); });
  }
  void wait(SharedWord& flag, std::uint32_t value) override {
    give([&flag, value] { wait_for_flag(flag, value); });
  }
  void record(CopyMark& mark) override {
    give([point = static_cast<HostMark&>(mark).record()] { point->reach(); });
  }
  void wait(const CopyMark& mark) override {
    const HostMark::PointPtr& point = static_cast<const HostMark&>(mark).last();
    if (point) give([point] { point->wait(); });
  }
  virtual void give(std::function<void()> work) = 0;
};

// The calling thread itself: who waits in it blocks.
class InlineQueue final : public HostQueue {
 public:
  void give(std::function<void()> work) override { work(); }
};

class ThreadQueue final : public HostQueue {
 public:
  explicit ThreadQueue(std::uint32_t seed) : random_(seed), thread_([this] { work(); }) {}
  // When all is done.
  ~ThreadQueue() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ending_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  void give(std::function<void()> work) override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(std::move(work));
    }
    changed_.notify_all();
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return ending_ || !queue_.empty(); });
      if (queue_.empty()) return;
      const std::function<void()> next = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      dawdle();
      next();
      lock.lock();
    }
  }
  void dawdle() {
    const auto chance = random_() % 8;
    if (chance == 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 300));
    if (chance == 1) std::this_thread::yield();
  }

  std::mt19937 random_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool ending_ = false;
  std::thread thread_;
};

class HostCopyEngine final : public CopyEngine {
 public:
  explicit HostCopyEngine(std::uint32_t seed = 0) : seed_(seed) {}

  std::shared_ptr<CopyMemory> allocate(std::size_t bytes) override {
    ++num_allocated_;
    auto segment = SharedMemorySegment::make(bytes);
    std::memset(segment->data(), 0xee, bytes);
    return std::make_shared<HostMemory>(std::move(segment));
  }
  CopyTicket ticket(const CopyMemory& memory) override {
    const SharedMemorySegment& segment = static_cast<const HostMemory&>(memory).segment();
    const Place place{::getpid(), segment.descriptor(), segment.size()};
    CopyTicket ticket{};
    std::memcpy(ticket.data(), &place, sizeof(place));
    return ticket;
  }
  std::shared_ptr<CopyMemory> open(const CopyTicket& ticket) override {
    Place place{};
    std::memcpy(&place, ticket.data(), sizeof(place));
    return std::make_shared<HostMemory>(SharedMemorySegment::open(place.process, place.descriptor, place.bytes));
  }
  std::shared_ptr<void> expose(std::shared_ptr<SharedMemorySegment> segment) override { return segment; }
  std::unique_ptr<CopyQueue> make_queue() override { return std::make_unique<ThreadQueue>(seed_++); }
  std::unique_ptr<CopyMark> make_mark() override { return std::make_unique<HostMark>(); }
  CopyQueue& current() override {
    if (current_ != nullptr) return *current_;
    return inline_;
  }

  int num_allocated() const { return num_allocated_.load(); }

  // Of the calling thread; null: the thread itself.
  static void set_current(HostQueue* queue) { current_ = queue; }
  static HostQueue* find_current() { return current_; }

 private:
  struct Place {
    pid_t process;
    int descriptor;
    std::size_t bytes;
  };

  static inline thread_local HostQueue* current_ = nullptr;
  std::uint32_t seed_;
  std::atomic<int> num_allocated_{0};
  InlineQueue inline_;
};

}  // namespace fastpipe::testing
