#include "copy_engine_link.h"

#include <algorithm>
#include <chrono>
#include <thread>

namespace fastpipe {

namespace {

constexpr std::chrono::seconds kMoment{1};
constexpr std::chrono::milliseconds kSweepPause{1};

}  // namespace

CopyEngineLink::~CopyEngineLink() {
  const Clock::time_point deadline = Clock::now() + kMoment;
  for (sweep(); !graves_.empty() && Clock::now() < deadline; sweep()) std::this_thread::sleep_for(kSweepPause);
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
