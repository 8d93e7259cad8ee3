#include "copy_engine_trial.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>

#include "clock.h"
#include "copy_engine_layout.h"
#include "errors.h"
#include "shared_memory_segment.h"

namespace fastpipe {

namespace {

struct Flags {
  alignas(kSharedLine) SharedWord go;
  alignas(kSharedLine) SharedWord gone;
};

constexpr std::chrono::milliseconds kGrace{10};  // in which a queue that does not wait would go on

constexpr double kHeldUpSeconds = 0.25;  // after which a queue with nothing to do is taken to wait for another

bool reached_in_time(const CopyMark& mark, double timeout_seconds) {
  const Clock::time_point deadline = Clock::now() + as_duration(timeout_seconds);
  while (!mark.reached()) {
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return true;
}

// All that they have now.
bool pass_in_time(CopyEngine& engine, const std::vector<CopyQueue*>& queues, double timeout_seconds) {
  std::vector<std::unique_ptr<CopyMark>> marks;
  for (CopyQueue* queue : queues) queue->record(*marks.emplace_back(engine.make_mark()));
  return std::all_of(marks.begin(), marks.end(), [&](const auto& m) { return reached_in_time(*m, timeout_seconds); });
}

}  // namespace

std::optional<std::string> obstacle_to_flags(CopyEngine& engine, double timeout_seconds) {
  try {
    const auto segment = SharedMemorySegment::make(sizeof(Flags));
    const auto exposed = engine.expose(segment);
    Flags& flags = *segment->at<Flags>(0);
    const auto queue = engine.make_queue();
    const auto before = engine.make_mark();
    const auto after = engine.make_mark();
    queue->record(*before);
    queue->wait(flags.go, 1);
    queue->write(flags.gone, 1);
    queue->record(*after);
    if (!reached_in_time(*before, timeout_seconds)) return "a stream of the device does not come to its work";
    std::this_thread::sleep_for(kGrace);
    if (after->reached() || flags.gone.load() != 0) return "a stream does not wait for a flag in the host's memory";
    flags.go.store(1 + kFarAhead);
    if (!reached_in_time(*after, timeout_seconds)) return "a stream does not see a flag that the host sets";
    if (flags.gone.load() != 1) return "the host does not see a flag that a stream writes";
    return std::nullopt;
  } catch (const Error& error) {
    return error.what();
  }
}

bool holds_up(CopyEngine& engine, CopyQueue& waiting, const std::vector<CopyQueue*>& others, double timeout_seconds) {
  if (!pass_in_time(engine, others, timeout_seconds)) return false;
  const auto segment = SharedMemorySegment::make(sizeof(Flags));
  const auto exposed = engine.expose(segment);
  SharedWord& go = segment->at<Flags>(0)->go;
  waiting.wait(go, 1);
  const bool pass = pass_in_time(engine, others, kHeldUpSeconds);
  go.store(1);
  pass_in_time(engine, {&waiting}, timeout_seconds);  // until then it looks at the flag
  return !pass;
}

}  // namespace fastpipe
