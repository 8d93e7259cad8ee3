// Transport between ranks that are threads of one process.
#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "common.h"
#include "program.h"
#include "transport.h"

namespace fastpipe {

namespace {

// A lane of the loopback transport: what is posted on it is executed in order on each of its two ends, and a message
// is copied when its send and its receive are both first in line. There is no buffer: overwriting or freeing
// too early what is being sent corrupts it, here as on a network.

// One posted send or receive. It belongs to its rank; while it is posted it is also in its lane's queue.
struct Operation {
  bool posted = false;  // the owner's: posted and not waited for yet
  bool done = false;    // the lane's, under its mutex
  bool is_send = false;
  bool stand_in = false;  // of a receive: what arrived was one
  std::int32_t channel = kNone;
  std::int32_t stage = kNone;  // the consumer's, on both ends
  std::int32_t microbatch = kNone;
  const Payload* source = nullptr;  // null: a stand-in
  Payload* target = nullptr;
  Clock::time_point eligible{};
  double completed = 0;
  std::exception_ptr error;  // of a receive: the copy failed
};

std::string text(const Operation& operation) {
  return std::string(operation.is_send ? "a send" : "a receive") + " on channel " + std::to_string(operation.channel) +
         " for stage " + std::to_string(operation.stage) + ", microbatch " + std::to_string(operation.microbatch);
}

bool fit(const Operation& one, const Operation& other) {
  return one.is_send != other.is_send && one.channel == other.channel && one.stage == other.stage &&
         one.microbatch == other.microbatch;
}

class LoopbackLane {
 public:
  // `end`: 0 is the lower rank, 1 the higher. False when the lane is broken.
  bool post(int end, Operation& operation) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (broken_) return false;
    queues_[end].push_back(&operation);
    // Who waits at the other end must learn until when a delayed send holds it up.
    if (match() != Clock::time_point::max()) changed_.notify_all();
    return true;
  }

  // Until the operation is done; false when the lane is broken or the time is over, which breaks it.
  bool wait(Operation& operation, Clock::time_point deadline) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      const Clock::time_point next = match();
      if (operation.done) return true;
      if (broken_) return false;
      if (Clock::now() >= deadline) {
        close(text(operation) + " was not met by the other side in time");
        return false;
      }
      changed_.wait_until(lock, std::min(next, deadline));
    }
  }

  // Nothing that was posted is touched any more once this has returned.
  void abort(const std::string& why) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!broken_) close(why);
  }

  std::string why_broken() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return why_;
  }

 private:
  // Executes what can be executed; returns when the next message is eligible, or the end of time.
  Clock::time_point match() {
    while (!queues_[0].empty() && !queues_[1].empty()) {
      Operation& lower = *queues_[0].front();
      Operation& higher = *queues_[1].front();
      if (!fit(lower, higher)) {
        // What is first in line stays first: this cannot resolve itself.
        close("deadlock: the lower rank has " + text(lower) + " first in line, the higher rank " + text(higher));
        break;
      }
      Operation& send = lower.is_send ? lower : higher;
      if (send.eligible != Clock::time_point{} && send.eligible > Clock::now()) return send.eligible;
      for (auto& queue : queues_) queue.pop_front();
      transfer(send, lower.is_send ? higher : lower);
    }
    return Clock::time_point::max();
  }

  void transfer(Operation& send, Operation& receive) {
    receive.stand_in = send.source == nullptr;
    try {
      if (!receive.stand_in) receive.target->copy_from(*send.source);
    } catch (...) {
      receive.error = std::current_exception();
    }
    send.completed = receive.completed = now_seconds();
    send.done = receive.done = true;
    changed_.notify_all();
  }

  void close(const std::string& why) {
    broken_ = true;
    why_ = why;
    queues_ = {};
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::array<Fifo<Operation*>, 2> queues_;
  bool broken_ = false;
  std::string why_;
};

// Its two ends tell a lane's operations apart, so it must not serve a third rank.
void require_pairs(const std::vector<Channel>& channels, const std::vector<std::int32_t>& lanes) {
  std::vector<std::set<std::int32_t>> ranks(lanes.size());

  for (std::size_t channel = 0; channel < channels.size(); ++channel) {
    const std::int32_t lane = lanes[channel];
    if (lane < 0 || lane >= static_cast<std::int32_t>(lanes.size())) {
      throw ArgumentError("lanes[" + std::to_string(channel) + "] = " + std::to_string(lane) +
                          ": number the lanes from 0 to at most the number of channels");
    }
    if (channels[channel].local()) continue;
    ranks[lane].insert({channels[channel].source, channels[channel].destination});
    if (ranks[lane].size() > 2) {
      throw ArgumentError("lane " + std::to_string(lane) + " joins more than two ranks; give each pair its own");
    }
  }
}

// What the ranks of one process share. Ranks connect one by one; it lives as long as any of them.
class LoopbackHub final {
 public:
  // lanes: that of each channel, by its index. delay_seconds: how long a send waits before it can be executed.
  LoopbackHub(std::vector<Channel> channels, std::vector<std::int32_t> lanes, double delay_seconds)
      : channels_(std::move(channels)), lane_numbers_(std::move(lanes)), delay_(as_duration(delay_seconds)) {
    if (lane_numbers_.size() != channels_.size()) {
      throw ArgumentError("lanes has " + std::to_string(lane_numbers_.size()) + " entries for " +
                          std::to_string(channels_.size()) + " channels; give one for each channel");
    }
    require_pairs(channels_, lane_numbers_);
    for (std::size_t lane = 0; lane < lane_numbers_.size(); ++lane) lanes_.push_back(std::make_unique<LoopbackLane>());
  }

  LoopbackLane& lane_of(std::int32_t channel) { return *lanes_[lane_numbers_[channel]]; }
  Clock::duration delay() const { return delay_; }

  // Throws ArgumentError for a program that it was not made for.
  void check(const RankProgram& program) const {
    if (program.channels().size() == channels_.size()) return;
    throw ArgumentError("this loopback was made for " + std::to_string(channels_.size()) +
                        " channels, the program has " + std::to_string(program.channels().size()) +
                        "; make a loopback for each program");
  }

  // Breaks every lane between two ranks.
  void abort(std::int32_t one, std::int32_t other, const std::string& why) {
    for (std::size_t channel = 0; channel < channels_.size(); ++channel) {
      const auto [source, destination, kind] = channels_[channel];
      if (std::minmax(source, destination) == std::minmax(one, other)) lane_of(channel).abort(why);
    }
  }

 private:
  std::vector<Channel> channels_;
  std::vector<std::int32_t> lane_numbers_;
  std::vector<std::unique_ptr<LoopbackLane>> lanes_;
  Clock::duration delay_;
};

class LoopbackTransport final : public Transport {
 public:
  LoopbackTransport(std::shared_ptr<LoopbackHub> hub, const RankProgram& program, double timeout_seconds)
      : hub_(std::move(hub)),
        program_(program),
        timeout_seconds_(timeout_seconds),
        specs_(program.size()),
        receives_(program.num_slots()),
        sends_(program.num_sends()),
        broken_(program.rank()) {}

  ~LoopbackTransport() override { withdraw("the rank has left in the middle of a step"); }

  void begin_step(std::int64_t signature, bool announce) override {
    broken_.require_none();
    specs_.open(signature, announce);
  }

  void post_receive(const Transfer& transfer, std::int32_t slot, Payload& into) override {
    Operation& operation = prepare(receives_[slot], transfer, false);
    operation.target = &into;
    post(operation);
  }

  bool wait_receive(std::int32_t slot) override {
    Operation& operation = receives_[slot];
    if (!wait(operation)) return false;
    if (operation.error) std::rethrow_exception(std::exchange(operation.error, nullptr));
    return !operation.stand_in;
  }

  void post_send(const Transfer& transfer, std::int32_t send, const Payload& from) override {
    specs_.learn_or_check(transfer.position, from, program_);
    Operation& operation = prepare(sends_[send], transfer, true);
    operation.source = &from;
    post(operation);
  }

  void post_stand_in(const Transfer& transfer, std::int32_t send) override {
    post(prepare(sends_[send], transfer, true));
  }

  double wait_send(std::int32_t send) override {
    Operation& operation = sends_[send];
    return wait(operation) ? operation.completed : 0;
  }

  void end_step(bool complete) override {
    specs_.close(complete);
    const bool was_broken = broken_.any();
    if (!withdraw("a channel is not empty at the end of the step") && !was_broken) broken_.refuse_undrained();
  }

 private:
  Operation& prepare(Operation& operation, const Transfer& transfer, bool is_send) const {
    operation = Operation{};
    operation.is_send = is_send;
    operation.channel = transfer.channel;
    operation.stage = is_send ? transfer.consumer(program_.channels()[transfer.channel].kind) : transfer.stage;
    operation.microbatch = transfer.microbatch;
    return operation;
  }

  void post(Operation& operation) {
    const std::int32_t peer = peer_of(operation);
    if (broken_.has(peer)) return;
    if (operation.is_send && hub_->delay() > Clock::duration::zero()) operation.eligible = Clock::now() + hub_->delay();
    operation.posted = true;
    const int end = program_.rank() < peer ? 0 : 1;
    if (!hub_->lane_of(operation.channel).post(end, operation)) abort_peer(operation);
  }

  // False: the peer is broken, there is nothing to wait for.
  bool wait(Operation& operation) {
    // Not posted since the peer is broken, or waited for before (an error's second wait, while draining).
    if (!operation.posted || broken_.has(peer_of(operation))) return false;
    const Clock::time_point deadline = Clock::now() + as_duration(timeout_seconds_);
    if (!hub_->lane_of(operation.channel).wait(operation, deadline)) abort_peer(operation);
    operation.posted = false;
    return true;
  }

  std::int32_t peer_of(const Operation& operation) const { return program_.peer_of(operation.channel); }

  void abort(std::int32_t peer, const std::string& why) {
    broken_.add(peer, why);
    hub_->abort(program_.rank(), peer, why);
  }

  [[noreturn]] void abort_peer(Operation& operation) {
    const std::int32_t peer = peer_of(operation);
    const std::string why = hub_->lane_of(operation.channel).why_broken();
    abort(peer, why);
    operation.posted = false;
    BrokenPeers::refuse(peer, "rank " + std::to_string(program_.rank()), why);
  }

  // Takes back what is still posted, since the lanes must not keep what belongs to this rank. True if nothing was.
  bool withdraw(const char* why) {
    bool idle = true;
    for (std::vector<Operation>* operations : {&receives_, &sends_}) {
      for (Operation& operation : *operations) {
        if (!operation.posted) continue;
        idle = false;
        if (!broken_.has(peer_of(operation))) abort(peer_of(operation), why);
        operation = {};
      }
    }
    return idle;
  }

  std::shared_ptr<LoopbackHub> hub_;
  RankProgram program_;
  double timeout_seconds_;
  SpecBook specs_;
  std::vector<Operation> receives_;
  std::vector<Operation> sends_;
  BrokenPeers broken_;
};

}  // namespace

Connect over_loopback(std::vector<Channel> channels, std::vector<std::int32_t> lanes, double delay_seconds) {
  auto hub = std::make_shared<LoopbackHub>(std::move(channels), std::move(lanes), delay_seconds);

  return [hub](const RankProgram& program, double timeout_seconds) {
    hub->check(program);
    return std::make_unique<LoopbackTransport>(hub, program, timeout_seconds);
  };
}

}  // namespace fastpipe
