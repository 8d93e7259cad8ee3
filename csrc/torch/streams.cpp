#include "streams.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/common.h"
#include "torch_private.h"

namespace fastpipe {

void Fence::record(c10::Device device) {
  if (!event_) event_.emplace(device.type());
  event_->record(current_stream(device));
  recorded_ = true;
}

void Fence::wait() const {
  if (recorded_) event_->block(current_stream(event_->device()));
}

StageStreams::StageStreams(c10::Device device, std::vector<c10::Stream> streams)
    : device_(device), streams_(std::move(streams)), ends_(streams_.size()) {}

std::optional<c10::Stream> StageStreams::of(std::size_t stage) const {
  return streams_.empty() ? std::nullopt : std::optional(streams_[stage]);
}

void StageStreams::fork() {
  if (device_.is_cpu()) return;
  caller_ = current_stream(device_);
  if (streams_.empty()) return;
  start_.record(device_);
  for (const c10::Stream& stream : streams_) {
    const c10::StreamGuard guard(stream);
    start_.wait();
  }
}

void StageStreams::join() {
  for (std::size_t i = 0; i < streams_.size(); ++i) {
    {
      const c10::StreamGuard guard(streams_[i]);
      ends_[i].record(device_);
    }
    ends_[i].wait();
  }
}

void keep_for_current_stream(const c10::DataPtr& data) {
  if (data.get() == nullptr) return;
  record_on_stream(data, current_stream(data.device()));
}

namespace {

constexpr int kReadings = 8;

std::uint64_t key_of(Op op, std::int32_t stage, std::int32_t microbatch) {
  const auto kind = static_cast<std::uint64_t>(op);
  return (kind << 56U) | (static_cast<std::uint64_t>(stage) << 32U) | static_cast<std::uint32_t>(microbatch);
}

}  // namespace

DeviceTimes::DeviceTimes(const RankProgram& program, c10::Device device)
    : device_(device), side_(stream_from_pool(device)) {
  std::unordered_map<std::int32_t, std::size_t> sends;
  for (std::size_t position = 0; position < program.size(); ++position) {
    const Instruction it = program[position];
    if (it.op == Op::kSend) sends[it.slot] = position;
    if (it.op == Op::kWaitSend) waits_.emplace_back(sends.at(it.slot), position);
    if (!is_compute(it.op)) continue;
    const bool is_pair = it.op == Op::kOverlapFB;
    places_[key_of(is_pair ? Op::kF : it.op, it.stage, it.microbatch)] = position;
    if (!is_pair) continue;
    places_[key_of(Op::kB, it.pair_stage, it.pair_microbatch)] = program.size() + pairs_.size();
    pairs_.push_back(position);
  }
  spans_.resize(program.size() + pairs_.size());
}

std::size_t DeviceTimes::place(Op op, std::int32_t stage, std::int32_t microbatch) const noexcept {
  return places_.find(key_of(op, stage, microbatch))->second;
}

void DeviceTimes::forget() {
  for (Span& span : spans_) span.start.noted = span.end.noted = false;
}

void DeviceTimes::note(Point& point) noexcept {
  try {
    if (!point.event) point.event.emplace(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
    point.event->record(current_stream(device_));
    point.noted = true;
  } catch (...) {
    // The device is broken, and says so to whoever uses it next.
  }
}

// On a stream with nothing to do an event passes as soon as it is recorded: in between the host's two looks at its
// clock, and the closer these are, the better it is known when.
DeviceTimes::ClockPair DeviceTimes::read_clocks() const {
  std::optional<ClockPair> found;
  double shortest = std::numeric_limits<double>::infinity();
  for (int i = 0; i < kReadings; ++i) {
    c10::Event event(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
    const double before = now_seconds();
    event.record(side_);
    event.synchronize();
    const double after = now_seconds();
    if (after - before >= shortest) continue;
    shortest = after - before;
    found.emplace(ClockPair{std::move(event), (before + after) / 2});
  }
  return std::move(*found);
}

void DeviceTimes::read(double* start, double* end) const {
  c10::Event done(device_.type());
  done.record(current_stream(device_));
  done.synchronize();
  const ClockPair now = read_clocks();
  const auto seconds = [&](const Point& point) { return now.seconds - point.event->elapsedTime(now.event) * 1e-3; };
  for (std::size_t i = 0; i < spans_.size(); ++i) {
    const Span& span = spans_[i];
    if (!span.start.noted || !span.end.noted) continue;
    const double first = seconds(span.start);
    const double last = seconds(span.end);
    const std::size_t instructions = spans_.size() - pairs_.size();
    if (i < instructions) {
      start[i] = first;
      end[i] = last;
      continue;
    }
    const std::size_t pair = pairs_[i - instructions];
    const bool alone = !spans_[pair].start.noted;
    start[pair] = alone ? first : std::min(start[pair], first);
    end[pair] = alone ? last : std::max(end[pair], last);
  }
  for (const auto& [send, wait] : waits_) end[send] = end[wait];
}

}  // namespace fastpipe
