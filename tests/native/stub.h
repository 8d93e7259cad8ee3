// A stage and a payload without torch: numbers that tell whether everything arrived, once, unharmed, at the right
// place.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/common.h"
#include "core/executor.h"
#include "core/transport.h"

namespace fastpipe::testing {

// Seconds after which what should come at all is taken to hang: no measure of speed, whatever else the machine does.
constexpr double kPatience = 200;
// Seconds that show that nobody has waited for as long.
constexpr double kFarBelowPatience = 60;

class StubSpec final : public Spec {
 public:
  explicit StubSpec(std::size_t size) : size(size) {}
  std::string text() const override { return std::to_string(size) + " numbers"; }
  const std::size_t size;
};

class StubPayload final : public Payload {
 public:
  // Overwritten, so that who clears what is still being sent is found out, by the values or by the race.
  void clear() noexcept override {
    for (std::int64_t& number : numbers) number = -1;
    numbers.clear();
  }
  bool empty() const override { return numbers.empty(); }
  void pack() override {}
  void copy_from(const Payload& source) override { numbers = static_cast<const StubPayload&>(source).numbers; }
  std::unique_ptr<Spec> spec() const override { return std::make_unique<StubSpec>(numbers.size()); }
  bool matches(const Spec& spec) const override { return static_cast<const StubSpec&>(spec).size == numbers.size(); }

  std::vector<std::int64_t> numbers;
};

// What may go wrong in a step; none of it by default.
struct Mishap {
  std::int32_t stage = kNone;
  std::int32_t microbatch = kNone;
  bool in_backward = false;
  bool changes_size = false;  // instead of throwing
};

// Keeps its memory from step to step, as the executor does. Every number grows by one in a stage's forward, and by 1000
// in its backward.
class StubStage final : public Stage {
 public:
  StubStage(std::int32_t index, std::int32_t num_stages, std::int32_t num_microbatches, const Mishap& mishap)
      : index_(index), num_stages_(num_stages), mishap_(mishap), records_(num_microbatches) {}

  bool is_first() const override { return index_ == 0; }
  bool is_last() const override { return index_ == num_stages_ - 1; }

  void forward(std::int32_t microbatch, const Payload* input) override {
    Numbers& activation = records_[microbatch].activation;
    if (is_first()) {
      activation.assign(16 + microbatch, microbatch);
    } else {
      activation = numbers_of(input);
    }
    require(activation, microbatch + index_);
    go_wrong(microbatch, false, activation);
    for (std::int64_t& number : activation) ++number;
  }

  void backward(std::int32_t microbatch, const Payload* gradient) override {
    Numbers& made = records_[microbatch].gradient;
    const Numbers& given = is_last() ? std::as_const(records_[microbatch].activation) : numbers_of(gradient);
    made = given;
    require(made, microbatch + num_stages_ + 1000 * (num_stages_ - 1 - index_));
    go_wrong(microbatch, true, made);
    for (std::int64_t& number : made) number += 1000;
    records_[microbatch].activation.clear();
    ++num_backwards_;
  }

  void backward_input(std::int32_t microbatch, const Payload* gradient) override {
    backward(microbatch, gradient);
    records_[microbatch].waits = true;
  }
  void backward_weight(std::int32_t microbatch) override {
    if (!records_[microbatch].waits) throw std::logic_error("stage " + std::to_string(index_) + ": W without I");
    records_[microbatch].waits = false;
  }

  void take(ChannelKind kind, std::int32_t microbatch, Payload& into) override {
    Record& record = records_[microbatch];
    auto& payload = static_cast<StubPayload&>(into);
    payload.numbers = kind == ChannelKind::kActivation ? record.activation : record.gradient;
  }

  void release() noexcept override {
    num_never_run_ = 0;
    for (Record& record : records_) {
      num_never_run_ += record.waits ? 1 : 0;
      record.activation.clear();
      record.gradient.clear();
      record.waits = false;
    }
  }

  std::int64_t num_backwards() const { return num_backwards_; }
  // The I of the last step that no W followed.
  std::size_t num_never_run() const { return num_never_run_; }

 private:
  using Numbers = std::vector<std::int64_t>;
  struct Record {
    Numbers activation;
    Numbers gradient;
    bool waits = false;  // for its W
  };

  static const Numbers& numbers_of(const Payload* payload) { return static_cast<const StubPayload*>(payload)->numbers; }

  void require(const Numbers& numbers, std::int64_t expected) const {
    for (const std::int64_t number : numbers) {
      if (number != expected) throw std::logic_error("stage " + std::to_string(index_) + " got a wrong number");
    }
    if (numbers.empty()) throw std::logic_error("stage " + std::to_string(index_) + " got nothing");
  }

  void go_wrong(std::int32_t microbatch, bool in_backward, Numbers& numbers) const {
    if (mishap_.stage != index_ || mishap_.microbatch != microbatch || mishap_.in_backward != in_backward) return;
    if (!mishap_.changes_size) throw std::runtime_error("mishap");
    numbers.push_back(numbers.front());
  }

  std::int32_t index_;
  std::int32_t num_stages_;
  const Mishap& mishap_;  // shared; changes between steps only
  std::vector<Record> records_;
  std::size_t num_never_run_ = 0;
  std::int64_t num_backwards_ = 0;
};

}  // namespace fastpipe::testing
