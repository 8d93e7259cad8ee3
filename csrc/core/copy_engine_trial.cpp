#include "copy_engine_trial.h"

#include <chrono>
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

bool reached_in_time(const CopyMark& mark, double timeout_seconds) {
  const Clock::time_point deadline = Clock::now() + as_duration(timeout_seconds);
  while (!mark.reached()) {
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return true;
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

}  // namespace fastpipe
