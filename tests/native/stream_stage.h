// A stage whose work is done later, in a stream, as on a device: the executor runs ahead of it. What arrives is used
// where it lies, until the backward.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "core/common.h"
#include "core/executor.h"
#include "core/shared_memory_transport.h"
#include "host_copy_engine.h"
#include "stub.h"

namespace fastpipe::testing {

// Waits for all that a queue has.
inline void drain(CopyQueue& queue) {
  HostMark mark;
  queue.record(mark);
  mark.last()->wait();
}

// Numbers that somebody will have made; whoever has work with them keeps them.
struct Numbers {
  std::shared_ptr<const void> owner;
  std::int64_t* data = nullptr;
  std::size_t count = 0;

  std::size_t bytes() const { return 8 * count; }
  static Numbers make(std::size_t count) {
    auto memory = std::make_shared<std::vector<std::int64_t>>(count);
    std::int64_t* const data = memory->data();
    return {std::move(memory), data, count};
  }
};

// As a device's allocator does it: memory is used again behind what the current stream has now.
inline void free_in_order(const Numbers& numbers) {
  if (HostQueue* const queue = HostCopyEngine::find_current()) queue->give([numbers] {});
}

class StreamPayload final : public Payload {
 public:
  // On the stream of the stage that used it.
  void clear() noexcept override {
    free_in_order(numbers);
    numbers = {};
    if (loan.active()) loan.end();
  }
  bool empty() const override { return numbers.data == nullptr; }
  void pack() override {}
  void copy_from(const Payload&) override { throw std::logic_error("nothing copies it"); }
  std::unique_ptr<Spec> spec() const override { return std::make_unique<StubSpec>(numbers.count); }
  bool matches(const Spec& spec) const override { return static_cast<const StubSpec&>(spec).size == numbers.count; }

  Numbers numbers;
  CopyLoan loan;
  HostMark made;  // of what is handed over between stages
};

class StreamCodec final : public Codec {
 public:
  explicit StreamCodec(std::shared_ptr<HostCopyEngine> engine) : engine_(std::move(engine)) {}

  // What is announced is copied by the host, perhaps in another stage's turn.
  std::size_t size(const Payload& payload, bool) const override { return 8 + numbers_of(payload).bytes(); }
  void write(const Payload& payload, const CellBytes& to) const override {
    const Numbers& numbers = numbers_of(payload);
    std::memcpy(to.data, &numbers.count, 8);
    std::memcpy(to.data + 8, numbers.data, numbers.bytes());
  }
  std::unique_ptr<Spec> read_spec(const CellBytes& from) const override {
    std::size_t count = 0;
    std::memcpy(&count, from.data, 8);
    return std::make_unique<StubSpec>(count);
  }
  void adopt(Payload& into, const Spec& spec, const CellBytes& from, SharedMemoryLease) const override {
    Numbers numbers = Numbers::make(static_cast<const StubSpec&>(spec).size);
    std::memcpy(numbers.data, from.data + 8, numbers.bytes());
    static_cast<StreamPayload&>(into).numbers = std::move(numbers);
  }

  std::size_t size(const Spec& spec) const override { return 8 * static_cast<const StubSpec&>(spec).size; }
  void list(const Payload& payload, std::vector<CopyPart>& parts) const override {
    const Numbers& numbers = numbers_of(payload);
    parts.push_back({reinterpret_cast<const std::byte*>(numbers.data), numbers.bytes()});
  }
  std::shared_ptr<const void> duplicate(std::vector<CopyPart>& parts) const override {
    const Numbers copy = Numbers::make(parts.front().bytes / 8);
    engine_->current().copy(reinterpret_cast<std::byte*>(copy.data), parts.front().data, copy.bytes());
    parts.front().data = reinterpret_cast<const std::byte*>(copy.data);
    ++num_duplicates;
    return {copy.data, [copy](const void*) { free_in_order(copy); }};
  }
  void adopt(Payload& into, const Spec& spec, CopyLoan loan) const override {
    auto& payload = static_cast<StreamPayload&>(into);
    payload.numbers = {loan.memory(), reinterpret_cast<std::int64_t*>(loan.data()),
                       static_cast<const StubSpec&>(spec).size};
    payload.loan = std::move(loan);
  }

  mutable std::atomic<int> num_duplicates{0};

 private:
  static const Numbers& numbers_of(const Payload& payload) {
    return static_cast<const StreamPayload&>(payload).numbers;
  }

  std::shared_ptr<HostCopyEngine> engine_;
};

// Every number grows by one in a forward, and by 1000 in a backward, as in StubStage. But where `passes`, every other
// stage hands on its input as it is, and so what lies in a place.
class StreamStage final : public Stage {
 public:
  StreamStage(std::int32_t index, std::int32_t num_stages, std::int32_t num_microbatches, bool passes,
              std::uint32_t seed)
      : index_(index), num_stages_(num_stages), passes_(passes), queue_(seed), records_(num_microbatches) {}

  bool is_first() const override { return index_ == 0; }
  bool is_last() const override { return index_ == num_stages_ - 1; }

  void forward(std::int32_t microbatch, const Payload* input) override {
    Record& record = records_[microbatch];
    if (input == nullptr) {
      record.input = Numbers::make(16 + static_cast<std::size_t>(microbatch));
      queue_.give([numbers = record.input, microbatch] { fill(numbers, microbatch); });
    } else {
      record.input = take_in(*input);
    }
    if (passes_on()) {
      record.output = record.input;
      return;
    }
    record.output = Numbers::make(record.input.count);
    queue_.give([this, in = record.input, out = record.output, expected = grown(microbatch, index_)] {
      grow(in, out, expected, 1);
    });
  }

  void backward(std::int32_t microbatch, const Payload* gradient) override {
    Record& record = records_[microbatch];
    const Numbers given = gradient == nullptr ? record.output : take_in(*gradient);
    record.gradient = Numbers::make(given.count);
    queue_.give([this, in = record.input, given, out = record.gradient, microbatch] {
      check(in, grown(microbatch, index_));  // it is needed again, and still there
      grow(given, out, grown(microbatch, num_stages_) + 1000 * (num_stages_ - 1 - index_), 1000);
      num_backwards.fetch_add(1);
    });
    record.input = record.output = {};
  }
  void backward_input(std::int32_t microbatch, const Payload* gradient) override { backward(microbatch, gradient); }
  void backward_weight(std::int32_t) override {}

  void take(ChannelKind kind, std::int32_t microbatch, Payload& into) override {
    auto& payload = static_cast<StreamPayload&>(into);
    payload.numbers = kind == ChannelKind::kActivation ? records_[microbatch].output : records_[microbatch].gradient;
    queue_.record(payload.made);
  }
  void begin_turn() override { HostCopyEngine::set_current(&queue_); }
  void end_turn() noexcept override { HostCopyEngine::set_current(nullptr); }
  void release() noexcept override { records_.assign(records_.size(), {}); }

  // When all of it is done.
  void finish() { drain(queue_); }

  std::atomic<int> num_wrong{0};
  std::atomic<int> num_backwards{0};

 private:
  struct Record {
    Numbers input;
    Numbers output;
    Numbers gradient;
  };

  bool passes_on() const { return passes_ && index_ % 2 == 1; }
  // What a microbatch's numbers are before a stage.
  std::int64_t grown(std::int32_t microbatch, std::int32_t stage) const {
    return microbatch + (passes_ ? (stage + 1) / 2 : stage);
  }
  // What another stage of the rank has made is waited for; a message was waited for when it was received.
  Numbers take_in(const Payload& payload) {
    const auto& given = static_cast<const StreamPayload&>(payload);
    if (!given.loan.active()) queue_.wait(given.made);
    return given.numbers;
  }
  static void fill(const Numbers& numbers, std::int64_t value) {
    for (std::size_t i = 0; i < numbers.count; ++i) numbers.data[i] = value;
  }
  void check(const Numbers& numbers, std::int64_t expected) {
    for (std::size_t i = 0; i < numbers.count; ++i) num_wrong += numbers.data[i] == expected ? 0 : 1;
  }
  void grow(const Numbers& from, const Numbers& to, std::int64_t expected, std::int64_t by) {
    check(from, expected);
    for (std::size_t i = 0; i < from.count; ++i) to.data[i] = from.data[i] + by;
  }

  std::int32_t index_;
  std::int32_t num_stages_;
  bool passes_;
  ThreadQueue queue_;
  std::vector<Record> records_;
};

}  // namespace fastpipe::testing
