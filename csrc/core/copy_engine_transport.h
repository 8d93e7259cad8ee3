// Transport between processes of one host by the copy engines of their devices: streams wait for streams of other
// processes, and no host takes part.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "copy_engine_codec.h"
#include "copy_engine_incoming.h"
#include "copy_engine_outgoing.h"
#include "copy_engine_source.h"
#include "copy_engine_watch.h"
#include "home.h"
#include "payload.h"
#include "program.h"
#include "shared_memory_transport.h"
#include "spec_book.h"
#include "transport.h"

namespace fastpipe {

// Why it cannot hang on a program that is proved. Read "the rank" as its streams, which follow its program, and
// "blocks" as a wait in a stream.
// 1. A step that announces goes through shared memory as a whole; see SharedMemoryTransport.
// 2. In any other step a receive is granted behind the end of its place's last use, which is the program's FREE of that
//    slot, before the POST_RECV; and behind the receives of its channel before it. Each channel has a queue for that,
//    so a grant waits for nothing that the proof does not have before the POST_RECV.
// 3. A message is copied behind what made it, behind the messages of its channel before it, and behind its grant. Each
//    channel has a queue for that. So it is copied where the proof lets its send match.
// 4. The rank's own streams wait in WAIT_RECV for the copy, and in WAIT_SEND for the copy, as in the proof.
// 5. At the beginning of a step a host waits for places that other hosts show at the beginning of theirs, before they
//    wait for anything.
// What streams share beside that, a queue of the hardware say, is the engine's care.
class CopyEngineTransport final : public Transport {
 public:
  CopyEngineTransport(const CopyEngineSource& source, const RankProgram& program, double timeout_seconds);
  ~CopyEngineTransport() override;

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
    Payload* into = nullptr;
  };
  struct Send {
    bool posted = false;
    std::int32_t channel = 0;
    std::unique_ptr<CopyMark> copied;
    std::shared_ptr<const void> kept;  // what was duplicated for it
  };
  // What a receiver shares with this rank, which sends to it.
  struct Shown {
    std::shared_ptr<SharedMemorySegment> segment;
    std::shared_ptr<void> exposed;
  };

  void make_incoming();
  void make_outgoing();
  void make_room(std::int64_t signature);
  std::vector<std::size_t> count_bytes() const;
  void wait_for_room(std::int32_t channel, std::size_t bytes);
  bool has_room(std::int32_t channel, std::size_t bytes);
  CopyWords* words_of(std::int32_t channel);
  bool lies_in_place(const std::vector<CopyPart>& parts) const;
  void wait_for_current(CopyMark& mark);
  template <typename Body>
  void hand_over(const Transfer& transfer, std::int32_t send, const Body& body);
  // False: the peer of a channel is broken, there is nothing to do.
  bool usable(std::int32_t channel);
  // In a step, once: it is drained with the others.
  void tell();
  [[noreturn]] void give_up(std::int32_t peer, const std::string& why);
  [[noreturn]] void fail() const;
  void finish() noexcept;
  bool busy() const noexcept;

  const Home home_;
  std::shared_ptr<CopyEngineLink> link_;
  std::shared_ptr<const CopyCodec> codec_;
  RankProgram program_;
  std::vector<CopyPlaces> places_;
  std::size_t number_;
  double timeout_seconds_;
  SpecBook specs_;
  SharedMemoryTransport announced_;
  bool announcing_ = false;
  std::int64_t signature_ = 0;
  std::set<std::int64_t> known_;  // the signatures for which there is room
  bool told_ = false;             // in a step that a peer is broken; the rank's thread alone
  // In this order: the watch releases the queues when they end, and looks into the segments.
  std::shared_ptr<SharedMemorySegment> segment_;
  std::shared_ptr<void> exposed_;
  std::map<std::int32_t, Shown> shown_;  // by peer
  CopyWatch watch_;
  std::vector<std::unique_ptr<CopyIncoming>> incoming_;  // by channel
  std::vector<std::unique_ptr<CopyOutgoing>> outgoing_;
  std::vector<Receive> receives_;  // by slot
  std::vector<Send> sends_;
  std::vector<CopyPart> parts_;
};

}  // namespace fastpipe
