// A copy engine for the fake device: threads for queues, as in tests/native, with an account of what they touch. Only
// fake_device.cpp includes it: unnamed, as pybind11's own types are hidden.
#pragma once

#include <memory>
#include <utility>

#include "fake_state.h"
#include "host_copy_engine.h"

namespace fake_device {

namespace {

using fastpipe::CopyMark;
using fastpipe::SharedWord;
using fastpipe::testing::HostMark;

struct FakeMark final : HostMark {
  Event made;
};

// Work is accounted for when it is given, and done by `Inner`.
template <typename Inner>
class FakeQueue final : public fastpipe::CopyQueue {
 public:
  template <typename... Arguments>
  explicit FakeQueue(std::size_t stream, Arguments... arguments) : stream_(stream), inner_(arguments...) {}

  void copy(std::byte* to, const std::byte* from, std::size_t bytes) override {
    account().touched(from, false, stream_, "a copy");
    inner_.copy(to, from, bytes);
  }
  void zero(std::byte* to, std::size_t bytes) override { inner_.zero(to, bytes); }
  void write(SharedWord& flag, std::uint32_t value) override { inner_.write(flag, value); }
  void wait(SharedWord& flag, std::uint32_t value) override { inner_.wait(flag, value); }
  void record(CopyMark& mark) override {
    static_cast<FakeMark&>(mark).made = account().recorded(stream_);
    inner_.record(mark);
  }
  void wait(const CopyMark& mark) override {
    account().blocked(stream_, static_cast<const FakeMark&>(mark).made);
    inner_.wait(mark);
  }
  void follow(std::size_t stream) { stream_ = stream; }

 private:
  std::size_t stream_;
  Inner inner_;
};

class FakeEngine final : public fastpipe::CopyEngine {
 public:
  std::shared_ptr<fastpipe::CopyMemory> allocate(std::size_t bytes) override { return host_.allocate(bytes); }
  fastpipe::CopyTicket ticket(const fastpipe::CopyMemory& memory) override { return host_.ticket(memory); }
  std::shared_ptr<fastpipe::CopyMemory> open(const fastpipe::CopyTicket& ticket) override { return host_.open(ticket); }
  std::shared_ptr<void> expose(std::shared_ptr<fastpipe::SharedMemorySegment> segment) override { return segment; }
  std::unique_ptr<fastpipe::CopyQueue> make_queue() override {
    return std::make_unique<FakeQueue<fastpipe::testing::ThreadQueue>>(account().new_stream(), seed_++);
  }
  std::unique_ptr<CopyMark> make_mark() override { return std::make_unique<FakeMark>(); }
  fastpipe::CopyQueue& current() override {
    current_.follow(current_stream);
    return current_;
  }

 private:
  fastpipe::testing::HostCopyEngine host_;
  FakeQueue<fastpipe::testing::InlineQueue> current_{0};
  std::uint32_t seed_ = 0;
};

}  // namespace

}  // namespace fake_device
