// Transport between ranks that are threads of one process.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common.h"
#include "program.h"
#include "transport.h"

namespace fastpipe {

// A lane of the loopback transport: what is posted on it is executed in order on each of its two ends, and a message
// is copied when its send and its receive are both first in line. There is no buffer: overwriting or freeing
// too early what is being sent corrupts it, here as on a network.

// One posted send or receive. It belongs to its rank; while it is posted it also hangs in its lane's queue.
struct LoopbackOperation {
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
  LoopbackOperation* next = nullptr;
};

class LoopbackLane {
 public:
  using Operation = LoopbackOperation;

  // `end`: 0 is the lower rank, 1 the higher. False when the lane is broken.
  bool post(int end, Operation& operation);
  // Until the operation is done; false when the lane is broken or the time is over, which breaks it.
  bool wait(Operation& operation, Clock::time_point deadline);
  // Nothing that was posted is touched any more once this has returned.
  void abort(const std::string& why);
  std::string why_broken();

 private:
  struct Queue {
    Operation* head = nullptr;
    Operation* tail = nullptr;
  };

  // Executes what can be executed; returns when the next message is eligible, or the end of time.
  Clock::time_point match();
  void transfer(Operation& send, Operation& receive);
  void close(const std::string& why);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::array<Queue, 2> queues_;
  bool broken_ = false;
  std::string why_;
};

// What the ranks of one process share. Ranks connect one by one; it lives as long as any of them.
class LoopbackHub final {
 public:
  // lanes: that of each channel, by its index. delay_seconds: how long a send waits before it can be executed.
  LoopbackHub(std::vector<Channel> channels, std::vector<std::int32_t> lanes, double delay_seconds);

  LoopbackLane& lane_of(std::int32_t channel) { return *lanes_[lane_numbers_[channel]]; }
  Clock::duration delay() const { return delay_; }
  // Throws ArgumentError for a program that it was not made for.
  void check(const RankProgram& program) const;
  // Breaks every lane between two ranks.
  void abort(std::int32_t one, std::int32_t other, const std::string& why);

 private:
  std::vector<Channel> channels_;
  std::vector<std::int32_t> lane_numbers_;
  std::vector<std::unique_ptr<LoopbackLane>> lanes_;
  Clock::duration delay_;
};

// Transport between ranks that are threads of one process: strict FIFO lanes, no buffer.
class LoopbackTransport final : public Transport {
 public:
  LoopbackTransport(std::shared_ptr<LoopbackHub> hub, const RankProgram& program, double timeout_seconds);
  ~LoopbackTransport() override;

  void begin_step(std::int64_t signature, bool announce) override;
  void post_receive(const Transfer& transfer, std::int32_t slot, Payload& into) override;
  bool wait_receive(std::int32_t slot) override;
  void post_send(const Transfer& transfer, std::int32_t send, const Payload& from) override;
  void post_stand_in(const Transfer& transfer, std::int32_t send) override;
  double wait_send(std::int32_t send) override;
  void end_step(bool complete) override;

 private:
  LoopbackOperation& prepare(LoopbackOperation& operation, const Transfer& transfer, bool is_send) const;
  void post(LoopbackOperation& operation);
  // False: the peer is broken, there is nothing to wait for.
  bool wait(LoopbackOperation& operation);
  std::int32_t peer_of(const LoopbackOperation& operation) const;
  void abort(std::int32_t peer, const std::string& why);
  [[noreturn]] void abort_peer(LoopbackOperation& operation);
  // Takes back what is still posted, since the lanes must not keep what belongs to this rank. True if nothing was.
  bool withdraw(const char* why);

  std::shared_ptr<LoopbackHub> hub_;
  RankProgram program_;
  double timeout_seconds_;
  SpecBook specs_;
  std::vector<LoopbackOperation> receives_;
  std::vector<LoopbackOperation> sends_;
  BrokenPeers broken_;
};

// For all ranks of a program; the arguments are those of a LoopbackHub.
Connect over_loopback(std::vector<Channel> channels, std::vector<std::int32_t> lanes, double delay_seconds);

}  // namespace fastpipe
