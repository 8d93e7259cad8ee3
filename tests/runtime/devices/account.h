// The account that the fake device keeps: who touched what memory, after whom, and who made the host wait.
//
// Every stream has a vector clock; events and waits move clocks. Where work touches memory, or memory is freed, without
// having waited for who touched it before, that is a race, and written down.
//
// Of a recording it knows which streams are in it: the one that it began on, and those that waited for an event of it.
// What CUDA does not let into a graph is written down: to wait for what was before, or for a recording that is over;
// work on another stream; a wait of the host; a stream that is not joined at the end. So is a message that would be
// received into memory that is not the recording's own.
//
// Told that an operation takes time, it also knows when a stream has done what it was given: not before the host gave
// it, and not before what it waits for.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace fake_device {

constexpr std::size_t kMaxStreams = 128;
using Clock = std::array<std::uint64_t, kMaxStreams>;

inline void join(Clock& one, const Clock& other) {
  for (std::size_t i = 0; i < kMaxStreams; ++i) one[i] = std::max(one[i], other[i]);
}

using Time = std::chrono::steady_clock;

struct Event {
  Clock clock{};
  Time::time_point time;
  std::uint64_t recording = 0;  // in which it was recorded; 0 for none
};

struct Block {
  std::size_t size;
  std::size_t home;  // the stream it was allocated on
  std::size_t writer;
  std::uint64_t written;
  Clock read{};
  std::set<std::size_t> recorded;
  std::uint64_t recording = 0;  // in which it was allocated; 0 for none
};

class Account {
 public:
  std::size_t new_stream() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return next_stream_++ % kMaxStreams;
  }

  // The allocator gives a stream any memory that was freed and belongs to it: who still uses that must be waited for.
  void allocated(const void* start, std::size_t size, std::size_t stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const std::uint64_t now = tick(stream);
    for (std::size_t user = 0; user < kMaxStreams; ++user) {
      if (user == stream || given_back_[stream][user] <= clocks_[stream][user]) continue;
      race("memory of stream " + std::to_string(stream) + " is given out again while stream " + std::to_string(user) +
           " uses it");
      given_back_[stream][user] = 0;
    }
    // What is there was used before on this stream: as if it were written now.
    blocks_[start] = {size, stream, stream, now, {}, {}, recording_};
  }

  void freed(const void* start) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = blocks_.find(start);
    if (found == blocks_.end()) return;
    const Block& block = found->second;
    Clock& given_back = given_back_[block.home];
    Clock awaited{};  // by the allocator itself: what recorded streams have by now
    for (const std::size_t stream : block.recorded) join(awaited, clocks_[stream]);
    for (std::size_t stream = 0; stream < kMaxStreams; ++stream) {
      const std::uint64_t written = stream == block.writer ? block.written : 0;
      const std::uint64_t last = std::max(block.read[stream], written);
      if (last > awaited[stream]) given_back[stream] = std::max(given_back[stream], last);
    }
    blocks_.erase(found);
  }

  void touched(const void* data, bool writes, std::size_t stream, const std::string& by) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Block* const block = find(data);
    if (block == nullptr) return;
    const std::uint64_t now = tick(stream);
    const Clock& seen = clocks_[stream];
    if (block->written > seen[block->writer]) {
      race(by + " on stream " + std::to_string(stream) + " does not wait for who wrote on stream " +
           std::to_string(block->writer));
    }
    if (!writes) {
      block->read[stream] = now;
      return;
    }
    for (std::size_t other = 0; other < kMaxStreams; ++other) {
      if (block->read[other] <= seen[other]) continue;
      race(by + " on stream " + std::to_string(stream) + " does not wait for who reads on stream " +
           std::to_string(other));
    }
    block->writer = stream;
    block->written = now;
  }

  // A recording must not hold memory that is given back while the recording stays.
  void received(const void* data) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Block* const block = find(data);
    if (recording() && block != nullptr && block->recording != recording_) fault("a receive into memory of before");
  }

  void used_on(const void* data, std::size_t stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (Block* const block = find(data)) block->recorded.insert(stream);
  }

  Event recorded(std::size_t stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++events_;
    return point_of(stream);
  }

  void blocked(std::size_t stream, const Event& event) {
    const std::lock_guard<std::mutex> lock(mutex_);
    look_at_wait(stream, event);
    join(clocks_[stream], event.clock);
    times_[stream] = std::max(times_[stream], event.time);
  }

  void host_waits(std::size_t stream, const std::string& why) { host_waits(all_of(stream), why); }

  void host_waits(const Event& event, const std::string& why) {
    std::this_thread::sleep_until(event.time);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (event.recording != 0) fault("the host waits for an event of a recording: " + why);
    ++waits_[why];
    join(host_, event.clock);
  }

  void worked(std::size_t stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (takes_ != Time::duration::zero()) times_[stream] = std::max(times_[stream], Time::now()) + takes_;
  }

  void set_seconds(double seconds) {
    const std::lock_guard<std::mutex> lock(mutex_);
    takes_ = std::chrono::duration_cast<Time::duration>(std::chrono::duration<double>(seconds));
  }

  void used(std::size_t stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    streams_.insert(stream);
    if (!recording()) return;
    if (members_.count(stream) == 0) fault("work on stream " + std::to_string(stream) + ", which is not recorded");
    last_[stream] = tick(stream);
  }

  void begin_recording(std::size_t stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    recording_ = ++last_recording_;
    origin_ = stream;
    members_ = {stream};
    last_ = {};
  }

  void end_recording() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const std::size_t stream : members_) {
      if (stream == origin_ || last_[stream] <= clocks_[origin_][stream]) continue;
      fault("stream " + std::to_string(stream) + " is not joined to the recording's own");
    }
    recording_ = 0;
  }

  void reset() {
    const std::lock_guard<std::mutex> lock(mutex_);
    races_.clear();
    waits_.clear();
    streams_.clear();
    events_ = 0;
  }
  std::vector<std::string> races() const { return races_; }
  std::map<std::string, int> waits() const { return waits_; }
  std::size_t num_streams() const { return streams_.size(); }
  int num_events() const { return events_; }
  std::vector<std::string> faults() const { return faults_; }

 private:
  Event all_of(std::size_t stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return point_of(stream);
  }

  Event point_of(std::size_t stream) {
    tick(stream);
    const std::uint64_t in = members_.count(stream) != 0 ? recording_ : 0;
    return {clocks_[stream], std::max(times_[stream], Time::now()), in};
  }

  bool recording() const { return recording_ != 0; }

  void look_at_wait(std::size_t stream, const Event& event) {
    if (event.recording != recording_ && event.recording != 0) fault("a wait for an event of a recording that is over");
    if (!recording()) return;
    if (event.recording == recording_) members_.insert(stream);
    if (members_.count(stream) == 0) return;
    if (event.recording == 0) fault("stream " + std::to_string(stream) + ", recorded, waits for what was before");
    last_[stream] = tick(stream);
  }

  void fault(const std::string& what) {
    if (faults_.size() < 50) faults_.push_back(what);
  }

  std::uint64_t tick(std::size_t stream) {
    join(clocks_[stream], host_);
    return ++clocks_[stream][stream];
  }

  Block* find(const void* data) {
    auto found = blocks_.upper_bound(data);
    if (found == blocks_.begin()) return nullptr;
    --found;
    const auto* const end = static_cast<const char*>(found->first) + found->second.size;
    return data < end ? &found->second : nullptr;
  }

  void race(const std::string& what) {
    if (races_.size() < 50) races_.push_back(what);
  }

  std::mutex mutex_;
  std::size_t next_stream_ = 1;
  std::array<Clock, kMaxStreams> clocks_{};
  std::array<Clock, kMaxStreams> given_back_{};  // by owner: the last use of freed memory, by user
  Clock host_{};
  Time::duration takes_{};  // an operation
  std::array<Time::time_point, kMaxStreams> times_{};
  std::map<const void*, Block> blocks_;
  std::set<std::size_t> streams_;
  std::vector<std::string> races_;
  std::map<std::string, int> waits_;
  std::uint64_t recording_ = 0;
  std::uint64_t last_recording_ = 0;
  std::size_t origin_ = 0;
  std::set<std::size_t> members_;
  Clock last_{};  // of each member's work and waits
  std::vector<std::string> faults_;
  int events_ = 0;
};

}  // namespace fake_device
