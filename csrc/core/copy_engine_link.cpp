#include "copy_engine_link.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "copy_engine_trial.h"
#include "errors.h"

namespace fastpipe {

namespace {

constexpr std::chrono::seconds kMoment{1};
constexpr std::chrono::milliseconds kSweepPause{1};
constexpr int kTries = 16;
constexpr double kIdleSeconds = 10;  // in which what was queued before should be done

}  // namespace

CopyEngineLink::~CopyEngineLink() {
  if (!home_.here()) {
    for (auto& [channel, queue] : queues_) static_cast<void>(queue.release());
  }
  const Clock::time_point deadline = Clock::now() + kMoment;
  for (sweep(); !graves_.empty() && Clock::now() < deadline; sweep()) std::this_thread::sleep_for(kSweepPause);
}

CopyQueue& CopyEngineLink::queue(const Channel& channel) {
  std::unique_ptr<CopyQueue>& queue = queues_[{channel.source, channel.destination, channel.kind}];
  if (!queue) queue = make_queue();
  return *queue;
}

std::unique_ptr<CopyQueue> CopyEngineLink::make_queue() {
  std::vector<CopyQueue*> others{&engine_->current()};
  for (const auto& [channel, queue] : queues_) {
    if (queue) others.push_back(queue.get());
  }
  std::vector<std::unique_ptr<CopyQueue>> passed_over;  // kept, so that the next one is another
  for (int i = 0; i < kTries; ++i) {
    auto queue = engine_->make_queue();
    if (!holds_up(*engine_, *queue, others, kIdleSeconds)) return queue;
    passed_over.push_back(std::move(queue));
  }
  throw Error(
      "every stream of the device holds up one that is in use, so they share queues of the hardware; close "
      "other pipelines of this process, or use transport='process_group'");
}

void CopyEngineLink::bury(std::shared_ptr<CopyMemory> memory, std::shared_ptr<SharedMemorySegment> segment,
                          const CopyWords& words, std::int32_t peer) {
  sweep();
  graves_.push_back({std::move(memory), std::move(segment), &words, peer});
}

void CopyEngineLink::sweep() {
  const auto closed = [&](const Grave& grave) {
    return grave.words->closed.load() != 0 || !host_->peer(grave.peer)->alive();
  };
  graves_.erase(std::remove_if(graves_.begin(), graves_.end(), closed), graves_.end());
}

}  // namespace fastpipe
