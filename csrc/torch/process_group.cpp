#include "process_group.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "codec.h"
#include "core/common.h"
#include "python_errors.h"

namespace fastpipe {

namespace {

constexpr std::chrono::milliseconds kTick{100};

std::string lost_text(std::int32_t rank) {
  return (rank == kUnknownRank ? "a rank" : "rank " + std::to_string(rank)) + " was lost";
}

}  // namespace

WorkWaits::~WorkWaits() {
  if (!ticker_.joinable()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  ticker_.join();
}

void WorkWaits::lose(std::int32_t rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (lost_ == kNoRank) lost_ = rank;
  if (current_ != nullptr) abort_wait(*current_);
}

void WorkWaits::wait(const WorkPtr& work, std::chrono::milliseconds timeout) {
  const Clock::time_point deadline = Clock::now() + timeout;
  auto left = timeout;
  while (!wait_once(*work, std::max(left, std::chrono::milliseconds{1}))) {
    check_signals();
    left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
  }
}

bool WorkWaits::wait_once(Work& work, std::chrono::milliseconds timeout) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (lost_ != kNoRank) throw Error(lost_text(lost_));
    current_ = &work;
    ++number_;
    if (!ticker_.joinable()) ticker_ = std::thread([this] { tick(); });
    if (sleeps_) changed_.notify_all();
  }
  const auto done = [this] {
    const std::lock_guard<std::mutex> lock(mutex_);
    current_ = nullptr;
  };
  try {
    const bool arrived = work.wait(timeout);
    done();
    return arrived;
  } catch (...) {
    done();
    throw;
  }
}

void WorkWaits::tick() {
  std::unique_lock<std::mutex> lock(mutex_);
  std::uint64_t before = 0;
  while (!ends_) {
    sleeps_ = current_ == nullptr && number_ == before;
    if (sleeps_) {
      changed_.wait(lock, [this] { return ends_ || current_ != nullptr; });
      sleeps_ = false;
    }
    if (current_ != nullptr && number_ == before) abort_wait(*current_);
    before = number_;
    changed_.wait_for(lock, kTick, [this] { return ends_; });
  }
}

namespace {

constexpr std::size_t kNumGroups = 4;
const char* const kFailed = "the backend has given it up, as it says above";
constexpr int kTag = 0;  // NCCL ignores tags: what passes elsewhere must not depend on them

std::size_t group_of(const Channel& channel) {
  return static_cast<std::size_t>(channel.kind) * 2 + (channel.destination < channel.source ? 1 : 0);
}

// The tensor's memory as bytes in a row, which every backend moves for every dtype and layout.
at::Tensor bytes_of(const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return tensor.as_strided({tensor.numel()}, {1}).view(at::kByte);
}

at::Tensor to_tensor(const Header& header, at::Device device) {
  const at::Tensor tensor = at::empty({static_cast<std::int64_t>(header.size())}, at::kLong);
  std::memcpy(tensor.mutable_data_ptr(), header.data(), sizeof(Header));
  return tensor.to(device);
}

std::string first_line(const char* text) {
  const std::string whole(text);
  return whole.substr(0, whole.find('\n'));
}

}  // namespace

Connect over_process_groups(std::vector<ProcessGroupPtr> groups, at::Device device, std::vector<c10::Stream> streams,
                            PairGroups pairs, Turns turns, Waits waits) {
  if (groups.size() != kNumGroups) {
    throw ArgumentError("groups has " + std::to_string(groups.size()) +
                        " entries; give four, by kind * 2 + (destination < source)");
  }
  if (!device.is_cpu() && streams.size() != kNumGroups) {
    throw ArgumentError("streams has " + std::to_string(streams.size()) + " entries; give one a group");
  }
  return [=](const RankProgram& program, double timeout_seconds) {
    return std::make_unique<ProcessGroupTransport>(groups, device, streams, pairs, turns, waits, program,
                                                   timeout_seconds);
  };
}

ProcessGroupTransport::ProcessGroupTransport(std::vector<ProcessGroupPtr> groups, at::Device device,
                                             std::vector<c10::Stream> streams, const PairGroups& pairs, Turns turns,
                                             Waits waits, const RankProgram& program, double timeout_seconds)
    : groups_(std::move(groups)),
      device_(device),
      waits_(std::move(waits)),
      program_(program),
      timeout_(std::chrono::duration_cast<std::chrono::milliseconds>(as_duration(timeout_seconds))),
      specs_(program.size()),
      side_streams_(device, std::move(streams)),
      receives_(program.num_slots()),
      sends_(program.num_sends()),
      turns_(std::move(turns)),
      queues_(program.channels().size()),
      broken_(program.rank()) {
  for (const auto& [peer, group] : pairs) {
    pairs_.emplace(peer, Pair{group, program_.rank() < peer ? 1 : 0, {}, {}});
  }
}

void ProcessGroupTransport::begin_step(std::int64_t signature, bool announce) {
  broken_.require_none();
  specs_.open(signature, announce);
  side_streams_.fork();
}

bool ProcessGroupTransport::begin(Pending& pending, const Transfer& transfer) {
  pending.state = Pending::State::kIdle;
  pending.transfer = transfer;
  pending.works.clear();
  pending.tensors.clear();
  pending.into = nullptr;
  pending.stand_in = false;
  return !broken_.has(peer_of(pending));
}

void ProcessGroupTransport::post_receive(const Transfer& transfer, std::int32_t slot, Payload& into) {
  Pending& pending = receives_[slot];
  if (!begin(pending, transfer)) return;
  pending.into = &static_cast<TensorPayload&>(into);
  if (specs_.announcing()) {
    // How much will come is in the message before it, for which only the consumer can wait.
    pending.state = Pending::State::kQueued;
    queues_[transfer.channel].push_back(slot);
    return;
  }
  post_early(pending);
  posted(transfer);
}

void ProcessGroupTransport::post_early(Pending& pending) {
  const std::vector<at::Tensor>& buffers = pending.into->prepare(specs_at(pending.transfer.position));
  const c10::OptionalStreamGuard stream(side_stream_of(pending));
  pending.into->wait_until_free();
  post(pending, buffers, false);
}

std::optional<c10::Stream> ProcessGroupTransport::side_stream_of(const Pending& pending) const {
  return side_streams_.of(pairs_.empty() ? group_of(channel_of(pending)) : peer_of(pending) % kNumGroups);
}

bool ProcessGroupTransport::wait_receive(std::int32_t slot) {
  Pending& pending = receives_[slot];
  while (pending.state == Pending::State::kQueued) receive_next(pending.transfer.channel);
  if (pending.state == Pending::State::kPosted) {
    wait(pending);
    pending.into->expose(specs_at(pending.transfer.position));
    pending.state = Pending::State::kArrived;
  }
  if (pending.state != Pending::State::kArrived) return false;
  pending.state = Pending::State::kIdle;
  return !pending.stand_in;
}

void ProcessGroupTransport::receive_next(std::int32_t channel) {
  const std::int32_t slot = queues_[channel].front();
  queues_[channel].pop_front();
  Pending& pending = receives_[slot];
  pending.state = Pending::State::kIdle;  // should it fail, it is not tried again
  if (!broken_.has(peer_of(pending))) receive_announced(pending);
}

void ProcessGroupTransport::receive_announced(Pending& pending) {
  const Header header = receive_header(pending);
  pending.stand_in = is_stand_in(header);
  if (!pending.stand_in) {
    specs_.learn(pending.transfer.position, std::make_unique<TensorListSpec>(decode_header(header)));
    const std::vector<TensorSpec>& specs = specs_at(pending.transfer.position);
    post(pending, pending.into->prepare(specs), false);
    wait(pending);
    pending.into->expose(specs);
    pending.into->filled();  // it may be another stage's turn than the consumer's
  }
  pending.state = Pending::State::kArrived;
}

Header ProcessGroupTransport::receive_header(Pending& pending) {
  const at::Tensor tensor = to_tensor(Header{}, device_);
  post(pending, {tensor}, false);
  wait(pending);
  const at::Tensor here = tensor.cpu();
  if (const auto why = why_aborted()) abort_peer(pending, why->c_str());
  Header header;
  std::memcpy(header.data(), here.const_data_ptr(), sizeof(Header));
  return header;
}

void ProcessGroupTransport::post_send(const Transfer& transfer, std::int32_t send, const Payload& from) {
  specs_.learn_or_check(transfer.position, from, program_);
  Pending& pending = sends_[send];
  if (!begin(pending, transfer)) return;
  if (specs_.announcing()) {
    post(pending, {to_tensor(encode_header(specs_at(transfer.position)), device_)}, true);
  }
  post(pending, static_cast<const TensorPayload&>(from).tensors(), true);
  posted(transfer);
}

void ProcessGroupTransport::post_stand_in(const Transfer& transfer, std::int32_t send) {
  Pending& pending = sends_[send];
  if (!begin(pending, transfer)) return;
  if (specs_.announcing()) return post(pending, {to_tensor(stand_in_header(), device_)}, true);
  std::vector<at::Tensor> zeros;
  for (const TensorSpec& spec : specs_at(transfer.position)) {
    zeros.push_back(at::zeros(spec.sizes, at::TensorOptions().dtype(spec.dtype).device(device_)));
  }
  post(pending, zeros, true);
  posted(transfer);
}

void ProcessGroupTransport::post(Pending& pending, const std::vector<at::Tensor>& tensors, bool is_send) {
  ProcessGroup& group = *groups_[group_of(channel_of(pending))];
  pending.state = Pending::State::kPosted;
  for (const at::Tensor& tensor : tensors) {
    std::vector<at::Tensor> flat{bytes_of(tensor)};
    pending.tensors.push_back(flat.front());
    if (!pairs_.empty() && !specs_.announcing()) {
      hold(pending, std::move(flat), is_send);
      continue;
    }
    try {
      pending.works.push_back(is_send ? group.send(flat, peer_of(pending), kTag)
                                      : group.recv(flat, peer_of(pending), kTag));
    } catch (const std::exception& error) {
      abort_peer(pending, error.what());
    }
  }
}

void ProcessGroupTransport::hold(Pending& pending, std::vector<at::Tensor> flat, bool is_send) {
  Pair& pair = pairs_.at(peer_of(pending));
  if (is_send && side_streams_.any()) {
    pair.ready.record(device_);
    const c10::OptionalStreamGuard side(side_stream_of(pending));
    pair.ready.wait();
  }
  pair.held.push_back({std::get<0>(turns_.at(pending.transfer.position)), &pending, std::move(flat), is_send});
}

void ProcessGroupTransport::posted(const Transfer& transfer) {
  if (pairs_.empty() || !std::get<1>(turns_.at(transfer.position))) return;
  Pair& pair = pairs_.at(program_.peer_of(transfer.channel));
  if (pair.held.empty()) return;
  Pending& any = *pair.held.front().pending;
  const c10::OptionalStreamGuard side(side_stream_of(any));
  try {
    begin_all(pair);
  } catch (const std::exception& error) {
    abort_peer(any, error.what());
  }
  pair.held.clear();
}

void ProcessGroupTransport::begin_all(Pair& pair) {
  std::map<std::int64_t, std::vector<Held>> operations;
  for (Held& part : pair.held) operations[part.operation].push_back(std::move(part));
  for (const auto& [number, parts] : operations) begin_together(pair, parts);
}

void ProcessGroupTransport::begin_together(Pair& pair, const std::vector<Held>& parts) {
  const auto begin = [&pair](const Held& part) {
    std::vector<at::Tensor> flat = part.flat;
    return part.is_send ? pair.group->send(flat, pair.peer, kTag) : pair.group->recv(flat, pair.peer, kTag);
  };
  if (!can_coalesce(*pair.group, device_.type())) {
    for (const Held& part : parts) part.pending->works.push_back(begin(part));
    return;
  }
  start_coalescing(*pair.group, device_.type());
  try {
    for (const Held& part : parts) begin(part);
  } catch (...) {
    // In a group that is never ended NCCL begins nothing, of nobody on this thread.
    end_coalescing(*pair.group, device_.type());
    throw;
  }
  const WorkPtr all = end_coalescing(*pair.group, device_.type());
  for (const Held& part : parts) {
    if (part.pending->works.empty()) part.pending->works.push_back(all);
  }
}

void ProcessGroupTransport::wait(Pending& pending) {
  for (WorkPtr& work : pending.works) {
    try {
      const WorkPtr once = std::move(work);
      // Given a time limit, NCCL would block the host; without, the current stream waits.
      if (device_.is_cpu()) {
        waits_->wait(once, timeout_);
      } else {
        once->wait();
      }
    } catch (const pybind11::error_already_set&) {
      broken_.add_all("a wait was interrupted");  // after a second Ctrl-C no message is waited for
      abandon();
      throw;
    } catch (const std::exception& error) {
      abort_peer(pending, error.what());
    }
  }
  pending.works.clear();
  pending.tensors.clear();
}

double ProcessGroupTransport::wait_send(std::int32_t send) {
  Pending& pending = sends_[send];
  if (pending.state != Pending::State::kPosted || broken_.has(peer_of(pending))) return 0;
  wait(pending);
  pending.state = Pending::State::kIdle;
  return 0;
}

std::optional<std::string> ProcessGroupTransport::why_aborted() const {
  if (const std::int32_t rank = waits_->lost(); rank != kNoRank) return lost_text(rank);
  if (has_failed()) return kFailed;
  return std::nullopt;
}

bool ProcessGroupTransport::has_failed() const {
  if (!device_.is_cuda()) return false;  // other backends know no such question
  const auto failed = [this](ProcessGroup& group) { return fastpipe::has_failed(group, device_.type()); };
  return std::any_of(groups_.begin(), groups_.end(), [&](const auto& group) { return failed(*group); }) ||
         std::any_of(pairs_.begin(), pairs_.end(), [&](const auto& pair) { return failed(*pair.second.group); });
}

void ProcessGroupTransport::check() const {
  const auto why = why_aborted();
  if (!why) return;
  const std::int32_t lost = waits_->lost();
  throw TransportError(lost == kNoRank ? kUnknownRank : lost,
                       "messages for rank " + std::to_string(program_.rank()) + " did not arrive (" + *why + ")");
}

void ProcessGroupTransport::abort_peer(Pending& pending, const char* why) {
  const std::int32_t peer = peer_of(pending);
  broken_.add(peer, first_line(why));
  const std::string place = program_.place(pending.transfer.position);
  if (const auto pair = pairs_.find(peer); pair != pairs_.end()) pair->second.held.clear();
  abandon();
  const std::int32_t lost = waits_->lost();
  throw TransportError(lost == kNoRank ? peer : lost, place + ": no transfer with rank " + std::to_string(peer) +
                                                          " any more (" + first_line(why) +
                                                          "); see what that rank was doing, or set a longer timeout");
}

void ProcessGroupTransport::abandon() {
  for (std::vector<Pending>* all : {&receives_, &sends_}) {
    for (Pending& other : *all) {
      if (other.state != Pending::State::kPosted || !broken_.has(peer_of(other))) continue;
      abandoned_.push_back(std::move(other));
      other = Pending{};
    }
  }
}

void ProcessGroupTransport::end_step(bool complete) {
  side_streams_.join();
  specs_.close(complete);
  const auto busy = [](const Pending& pending) { return pending.state != Pending::State::kIdle; };
  const bool left =
      std::any_of(receives_.begin(), receives_.end(), busy) || std::any_of(sends_.begin(), sends_.end(), busy);
  if (left && !broken_.any()) broken_.refuse_undrained();
}

const std::vector<TensorSpec>& ProcessGroupTransport::specs_at(std::size_t position) const {
  return specs_in(specs_.at(position));
}

}  // namespace fastpipe
