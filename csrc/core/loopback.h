// Transport between ranks that are threads of one process: strict FIFO lanes, no buffer.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "clock.h"
#include "loopback_hub.h"
#include "loopback_lane.h"
#include "payload.h"
#include "program.h"
#include "spec_book.h"
#include "transport.h"

namespace fastpipe {

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
  void break_off(std::int32_t peer, const std::string& why);
  [[noreturn]] void give_up(LoopbackOperation& operation);
  // Takes back what is still posted, since the lanes must not keep what belongs to this rank. True if nothing was.
  bool leave(const char* why);

  std::shared_ptr<LoopbackHub> hub_;
  RankProgram program_;
  double timeout_seconds_;
  SpecBook specs_;
  std::vector<LoopbackOperation> receives_;
  std::vector<LoopbackOperation> sends_;
  std::vector<bool> broken_;  // by peer
  std::string why_broken_;
};

}  // namespace fastpipe
