#include "streams.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

namespace fastpipe {

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

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
  const c10::Device device = data.device();
  c10::impl::VirtualGuardImpl(device.type()).recordDataPtrOnStream(data, current_stream(device));
}

}  // namespace fastpipe
