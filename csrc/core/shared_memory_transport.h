// Transport between processes of one host: messages lie in memory that both map, and the consumer computes on it there.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common.h"
#include "host_memory.h"
#include "program.h"
#include "shared_ring.h"
#include "transport.h"

namespace fastpipe {

// What a rank needs for one program beside the program: made on every rank, in the same order.

// What a channel needs in a step, by the programs of both its ends.
struct ChannelNeeds {
  std::int32_t slots = 0;  // how many receives are at most posted and not freed
  std::int32_t messages = 0;
};

// Those between two ranks.
std::vector<bool> channels_between_ranks(const std::vector<Channel>& channels);

// Adds what a rank's program tells of the channels on which it receives.
void count_needs(const RankProgram& program, std::vector<ChannelNeeds>& needs);

class SharedMemoryPlan final {
 public:
  // carried: by channel, whether it goes through shared memory; what stays on a rank does not.
  SharedMemoryPlan(std::shared_ptr<SharedMemoryLink> link, std::shared_ptr<const Codec> codec,
                   std::vector<ChannelNeeds> needs, std::vector<bool> carried);

  // Throws ArgumentError for a program that it was not made for.
  void check(const RankProgram& program) const;

  const std::shared_ptr<SharedMemoryLink>& link() const { return link_; }
  const std::shared_ptr<const Codec>& codec() const { return codec_; }
  const ChannelNeeds& needs(std::size_t channel) const { return needs_.at(channel); }
  bool carries(std::size_t channel) const { return carried_.at(channel); }
  std::size_t number() const { return number_; }
  // Differs when the ranks do not mean the same program.
  std::uint64_t fingerprint() const;

 private:
  std::shared_ptr<SharedMemoryLink> link_;
  std::shared_ptr<const Codec> codec_;
  std::vector<ChannelNeeds> needs_;
  std::vector<bool> carried_;
  std::size_t number_;
};

// Transport between processes of one host: messages lie in memory that both map, and the consumer computes on it there.

// Why it cannot hang on a program that is proved. The proof lets a send match as soon as its receive is posted, with
// nobody's help, and blocks ranks in WAIT_SEND and WAIT_RECV alone. Here
// 1. post_send never blocks. Where there is no room the message waits in a queue, which is served whenever the rank
//    blocks (and at its next send): so a rank that blocks copies all that has room, as the proof has it.
// 2. There is room once the receive is posted. Say message n waits and its receive is posted: then at most `slots` - 1
//    of the messages before it are posted and not freed, since that is how `slots` was counted in the receiver's
//    program, and every other one has been freed by the program. A cell is free when its last tensor has died. For one
//    that the program has freed and somebody still holds, the receiver says so before it sleeps (hold_back), and the
//    sender makes another. So one of `slots` + 2 cells is free, or there is memory for one, and the ring has more
//    entries than a step has messages on the channel. (Those of an earlier step are taken by a receiver that is on its
//    way through it.)
// 3. Whoever makes room looks whether the sender is starved, and rings; see SharedMemoryDoorbell for why no wake-up is
//    lost.
// So every send that would match in the proof is copied here, at the latest when its rank blocks, and the ranks go on.
class SharedMemoryTransport final : public Transport {
 public:
  SharedMemoryTransport(const SharedMemoryPlan& source, const RankProgram& program, double timeout_seconds);

  void begin_step(std::int64_t signature, bool announce) override;
  void post_receive(const Transfer& transfer, std::int32_t slot, Payload& into) override;
  bool wait_receive(std::int32_t slot) override;
  void post_send(const Transfer& transfer, std::int32_t send, const Payload& from) override;
  void post_stand_in(const Transfer& transfer, std::int32_t send) override;
  double wait_send(std::int32_t send) override;
  void end_step(bool complete) override;

  // For a rank that is going to block for something else. First it says what it holds on to, ...
  void hold_back();
  // ... and copies what has room. True: nothing waits any more; else it has to be served while the rank blocks, until
  // it is over, of which ring_own() is the sign, by another thread. What is thrown is about one message, for which a
  // stand-in was sent.
  bool advance();
  void serve(const std::atomic<bool>& over);
  // The program has freed a slot, and the next message in it may be another transport's.
  void leave(std::int32_t slot) { receives_[slot].watch.end(); }
  void ring_own() const { link_->doorbell().ring_always(); }

 private:
  struct Receive {
    enum class State { kIdle, kPosted, kArrived };

    State state = State::kIdle;
    Transfer transfer{};
    Payload* into = nullptr;
    bool stand_in = false;
    SharedMemoryWatch watch;
  };

  void make_rings(const SharedMemoryPlan& source);
  bool prepare(const Transfer& transfer, std::int32_t send, const Payload* from);
  void post(std::int32_t send);
  void receive_next(std::int32_t channel);
  bool arrived(SharedMemoryInbox& inbox, std::size_t position);
  void deliver(Receive& receive, SharedMemoryMail mail);
  // Sleeps until `ready` or the peer is given up.
  void wait(const SharedMemoryPeer& peer, std::uint32_t reason, std::size_t position, FunctionRef<bool()> ready);
  bool look(FunctionRef<bool()> ready);
  bool spin(FunctionRef<bool()> ready);
  [[noreturn]] void give_up(std::int32_t peer, std::size_t position, const std::string& why);
  void lose(std::int32_t peer, const std::string& why);
  void lose_all(const std::string& why);
  void check_signals();
  std::int32_t peer_of(std::int32_t channel) const { return program_.channels()[channel].peer_of(program_.rank()); }

  std::shared_ptr<SharedMemoryLink> link_;
  std::shared_ptr<const Codec> codec_;
  RankProgram program_;
  double timeout_seconds_;
  SpecBook specs_;
  std::shared_ptr<SharedMemorySegment> rings_;
  std::vector<std::unique_ptr<SharedMemoryOutbox>> outboxes_;  // by channel; null for those of others
  std::vector<std::unique_ptr<SharedMemoryInbox>> inboxes_;
  std::vector<Fifo<std::int32_t>> queues_;  // by channel: the slots of its posted receives, in order
  std::vector<Receive> receives_;
  std::vector<SharedMemorySend> sends_;
  std::vector<std::size_t> send_positions_;  // for messages
  BrokenPeers broken_;
  std::vector<std::pair<std::int32_t, std::string>> lost_;  // peers that are broken at the end of the step, and why
};

Connect over_shared_memory(std::shared_ptr<const SharedMemoryPlan> plan);

}  // namespace fastpipe
