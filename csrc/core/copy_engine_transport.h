// Transport between processes of one host by the copy engines of their devices: streams wait for streams of other
// processes, and no host takes part.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "copy_engine_link.h"
#include "program.h"
#include "shared_memory_transport.h"
#include "shared_ring.h"
#include "transport.h"

namespace fastpipe {

// Where the messages of one channel go: every message of a step has a place in its receiver's memory, known to both
// ends from the receiver's program.
struct CopyPlaces {
  std::vector<std::int32_t> of_message;  // by the message's number in the step
  std::int32_t count = 0;
};

// Adds those of the channels on which a rank receives: a place for each slot that the channel ever fills.
void add_places(const RankProgram& program, std::vector<CopyPlaces>& places);

// Why it cannot hang on a program that is proved. Read "the rank" as its streams, which follow its program, and
// "blocks" as a wait in a stream.
// 1. A step that announces goes through shared memory as a whole; see SharedMemoryTransport.
// 2. In any other step a receive is granted behind the end of its place's last use, which is the program's FREE of that
//    slot, before the POST_RECV, or an earlier step's; and behind the receives of its channel before it. Each channel
//    has a queue for that, so a grant waits for nothing that the proof does not have before the POST_RECV.
// 3. A message is copied behind what made it, behind the messages of its channel before it, and behind its grant. Each
//    channel has a queue for that. So it is copied where the proof lets its send match.
// 4. The rank's own streams wait in WAIT_RECV for the copy, and in WAIT_SEND for the copy, as in the proof.
// 5. At the beginning of a step a host waits for places that other hosts show at the beginning of theirs, before they
//    wait for anything.
// What streams share beside that, a queue of the hardware say, is the engine's care.
class CopyEngineTransport final : public Transport {
 public:
  CopyEngineTransport(std::shared_ptr<CopyEngineLink> link, const SharedMemoryPlan& announced,
                      std::vector<CopyPlaces> places, const RankProgram& program, double timeout_seconds);

  void begin_step(std::int64_t signature, bool announce) override;
  void post_receive(const Transfer& transfer, std::int32_t slot, Payload& into) override;
  bool wait_receive(std::int32_t slot) override;
  void post_send(const Transfer& transfer, std::int32_t send, const Payload& from) override;
  void post_stand_in(const Transfer& transfer, std::int32_t send) override;
  double wait_send(std::int32_t send) override;
  void end_step(bool complete) override;
  void check() const override;

 private:
  struct Receive {
    bool posted = false;
    Transfer transfer{};
    std::uint64_t message = 0;
    std::int32_t place = 0;
    Payload* into = nullptr;
  };
  struct Send {
    bool posted = false;
    std::int32_t channel = 0;
    std::unique_ptr<CopyMark> copied;
    std::shared_ptr<const void> kept;  // what was duplicated for it
  };

  void make_room(std::int64_t signature);
  std::vector<std::size_t> count_bytes() const;
  void wait_for_room(std::size_t channel, std::size_t bytes);
  // Of the next message of a step.
  std::int32_t next_place(std::int32_t channel) { return places_[channel].of_message.at(num_messages_[channel]++); }
  void wait_for_current(CopyMark& mark);
  template <typename Body>
  void hand_over(const Transfer& transfer, std::int32_t send, const Body& body);
  std::int32_t peer_of(std::size_t channel) const { return program_.channels()[channel].peer_of(program_.rank()); }
  // False: the peer of a channel is broken, there is nothing to do.
  bool usable(std::int32_t channel);
  // In a step, once: it is drained with the others.
  void tell();
  [[noreturn]] void give_up(std::int32_t peer, const std::string& why);
  [[noreturn]] void fail() const;

  std::shared_ptr<CopyEngineLink> link_;
  std::shared_ptr<const Codec> codec_;
  RankProgram program_;
  std::vector<CopyPlaces> places_;  // by channel
  double timeout_seconds_;
  SpecBook specs_;
  SharedMemoryTransport announced_;
  bool announcing_ = false;
  std::int64_t signature_ = 0;
  std::set<std::int64_t> known_;           // the signatures for which there is room
  bool told_ = false;                      // in a step that a peer is broken; the rank's thread alone
  std::vector<CopyIncoming*> incoming_;    // by channel; the link's
  std::vector<CopyOutgoing*> outgoing_;    // from the first known step on
  std::vector<std::size_t> num_messages_;  // by channel, so far in the step
  std::vector<Receive> receives_;          // by slot
  std::vector<Send> sends_;
  std::vector<CopyPart> parts_;
};

// announced: how the messages of a step go that announces them; it carries every channel between ranks.
Connect over_copy_engines(std::shared_ptr<CopyEngineLink> link, std::shared_ptr<const SharedMemoryPlan> announced,
                          std::vector<CopyPlaces> places);

}  // namespace fastpipe
