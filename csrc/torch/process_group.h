// Transport over torch.distributed, and waits of the host for its messages, which another thread can end.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "codec.h"
#include "core/common.h"
#include "core/program.h"
#include "core/transport.h"
#include "payload.h"
#include "streams.h"
#include "torch_private.h"

namespace fastpipe {

// A rank that is not known, as in a TransportError; none.
constexpr std::int32_t kUnknownRank = -1;
constexpr std::int32_t kNoRank = -2;

// Whether a rank is lost, and the wait of the one thread that waits. Work::abort() of Gloo's sends and receives ends
// one wait, whether it has begun or not; the message may come all the same, and can be waited for again. So a wait is
// ended now and then, in order that Python can handle signals; and for good when any rank is lost, as then no step can
// be completed.
class WorkWaits final {
 public:
  WorkWaits() = default;
  WorkWaits(const WorkWaits&) = delete;
  WorkWaits& operator=(const WorkWaits&) = delete;
  // Not in a forked child, which has no thread to wait for (fastpipe/runtime/common/guards.py).
  ~WorkWaits();

  // From any thread: a rank is gone, or one that is not known; nothing is waited for any more.
  void lose(std::int32_t rank);
  // The first one; kNoRank while there is none.
  std::int32_t lost() const { return lost_; }
  // Without the GIL. Throws what Work::wait throws, Error when a rank is lost, and what a handler of a signal raises.
  void wait(const WorkPtr& work, std::chrono::milliseconds timeout);

 private:
  bool wait_once(Work& work, std::chrono::milliseconds timeout);
  // Its thread's: ends a wait that it finds twice.
  void tick();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<std::int32_t> lost_{kNoRank};
  Work* current_ = nullptr;   // what is waited for
  std::uint64_t number_ = 0;  // of waits so far
  bool sleeps_ = true;        // the thread, until there is another wait
  bool ends_ = false;
  std::thread ticker_;  // made by the first wait
};

// Shared with Python. Where devices wait, the groups are aborted because of its first lost rank: what streams find then
// is no message.
using Waits = std::shared_ptr<WorkWaits>;

// Where the transfers that two ranks both begin side by side are one operation
// (fastpipe/runtime/transport/process_group.py): a group of the two, by peer; and by position in the program which
// operation a transfer is part of, and whether it is the last that its rank has side by side with it.
using PairGroups = std::map<std::int32_t, ProcessGroupPtr>;
using Turns = std::map<std::size_t, std::tuple<std::int64_t, bool>>;

class ProcessGroupTransport final : public Transport {
 public:
  ProcessGroupTransport(std::vector<ProcessGroupPtr> groups, at::Device device, std::vector<c10::Stream> streams,
                        const PairGroups& pairs, Turns turns, Waits waits, const RankProgram& program,
                        double timeout_seconds);

  void begin_step(std::int64_t signature, bool announce) override;
  void post_receive(const Transfer& transfer, std::int32_t slot, Payload& into) override;
  bool wait_receive(std::int32_t slot) override;
  void post_send(const Transfer& transfer, std::int32_t send, const Payload& from) override;
  void post_stand_in(const Transfer& transfer, std::int32_t send) override;
  double wait_send(std::int32_t send) override;
  void end_step(bool complete) override;
  void check() const override;

 private:
  // One message that is on its way.
  struct Pending {
    enum class State { kIdle, kQueued, kPosted, kArrived };

    State state = State::kIdle;
    Transfer transfer{};
    std::vector<at::Tensor> tensors;  // what the works read or write: declared first, so that it outlives them
    std::vector<WorkPtr> works;       // each is waited for exactly once
    TensorPayload* into = nullptr;
    bool stand_in = false;
  };

  // A part of an operation that is not begun yet.
  struct Held {
    std::int64_t operation;
    Pending* pending;
    std::vector<at::Tensor> flat;
    bool is_send;
  };
  struct Pair {
    ProcessGroupPtr group;
    int peer;  // in the group
    std::vector<Held> held;
    Fence ready;  // what a transfer waits for
  };

  // False: the peer is broken, there is nothing to do.
  bool begin(Pending& pending, const Transfer& transfer);
  // A device starts a transfer behind what the stream has on which it is posted. On a stream beside the stage's, which
  // waits for the memory alone, that is as soon as the message is there.
  void post_early(Pending& pending);
  void post(Pending& pending, const std::vector<at::Tensor>& tensors, bool is_send);
  // Notes a transfer for its operation, which is to come after what the current stream has.
  void hold(Pending& pending, std::vector<at::Tensor> flat, bool is_send);
  // After every transfer: with the last of those side by side their operations are begun.
  void posted(const Transfer& transfer);
  void begin_all(Pair& pair);
  void begin_together(Pair& pair, const std::vector<Held>& parts);
  void wait(Pending& pending);
  void receive_next(std::int32_t channel);
  void receive_announced(Pending& pending);
  Header receive_header(Pending& pending);
  const std::vector<TensorSpec>& specs_at(std::size_t position) const;
  // Where receives are posted early, and operations.
  std::optional<c10::Stream> side_stream_of(const Pending& pending) const;
  const Channel& channel_of(const Pending& pending) const { return program_.channels()[pending.transfer.channel]; }
  std::int32_t peer_of(const Pending& pending) const { return program_.peer_of(pending.transfer.channel); }
  [[noreturn]] void abort_peer(Pending& pending, const char* why);
  // What is under way with broken peers is waited for no more.
  void abandon();
  // Where streams wait, and not the host: why the messages that they wait for were aborted.
  std::optional<std::string> why_aborted() const;
  // Whether a backend has aborted a message by itself.
  bool has_failed() const;

  std::vector<ProcessGroupPtr> groups_;
  at::Device device_;
  const Waits waits_;
  RankProgram program_;
  std::chrono::milliseconds timeout_;
  SpecBook specs_;
  StageStreams side_streams_;  // by group; none on a CPU
  std::vector<Pending> receives_;
  std::vector<Pending> sends_;
  std::map<std::int32_t, Pair> pairs_;  // by peer; none where nothing is coalesced
  Turns turns_;
  std::vector<Fifo<std::int32_t>> queues_;  // by channel: the slots of announced receives, in order
  BrokenPeers broken_;
  std::vector<Pending> abandoned_;  // to or from broken peers: the backend may still touch their memory
};

// groups: one for each class and direction, by kind * 2 + (destination < source). Then no pending receive holds up a
// send, and a backend that keeps one stream a pair of ranks executes each channel by itself. Group rank = pipeline
// rank. streams: for the receives that each group posts early, on a device that has any.
Connect over_process_groups(std::vector<ProcessGroupPtr> groups, at::Device device, std::vector<c10::Stream> streams,
                            PairGroups pairs, Turns turns, Waits waits);

}  // namespace fastpipe
