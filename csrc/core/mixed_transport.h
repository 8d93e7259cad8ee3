// Transport between ranks of several hosts: messages to ranks of this host lie in shared memory, the others go another
// way.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "common.h"
#include "program.h"
#include "shared_memory_transport.h"
#include "transport.h"

namespace fastpipe {

// Why it cannot hang on a program that is proved. Every channel belongs to one of the two, so the lanes are those of
// the proof. What is left to show is that a rank that blocks for the one keeps its promises to the other.
// 1. While it blocks for a near message, far ones move by themselves, as they do under a rank that computes.
// 2. While it blocks for a far message, shared memory needs it in two ways: to say which messages it holds on to, and
// to
//    copy what waits for room (see SharedMemoryTransport). So it says it before it blocks; and where something waits
//    for room, which is rare, the helper blocks for the far message, and the rank copies.
// 3. In a step that announces, far receives are made at their waits and near ones when they are posted. That is proved,
//    too: the proof of receives at their waits holds for any that are made earlier, as no two channels share a lane.
class MixedTransport final : public Transport {
 public:
  MixedTransport(const SharedMemoryChannels& near, const Connect& far, const RankProgram& program,
                 double timeout_seconds);

  void begin_step(std::int64_t signature, bool announce) override;
  void post_receive(const Transfer& transfer, std::int32_t slot, Payload& into) override;
  bool wait_receive(std::int32_t slot) override;
  void post_send(const Transfer& transfer, std::int32_t send, const Payload& from) override;
  void post_stand_in(const Transfer& transfer, std::int32_t send) override;
  double wait_send(std::int32_t send) override;
  void end_step(bool complete) override;

 private:
  Transport& side_of(std::int32_t channel);
  // Blocks in `far`, which waits for a far message, and serves shared memory meanwhile.
  void block(FunctionRef<void()> far);
  void block_beside(FunctionRef<void()> far);

  std::vector<bool> is_near_;  // by channel
  SharedMemoryTransport near_;
  std::unique_ptr<Transport> far_;
  std::vector<Transport*> receives_;  // by slot: the side that was asked last
  std::vector<Transport*> sends_;
  std::unique_ptr<Helper> helper_;  // made when it is needed
};

// `near` says which channels are its.
Connect over_both(std::shared_ptr<const SharedMemoryChannels> near, Connect far);

}  // namespace fastpipe
