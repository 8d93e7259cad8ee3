// What the ranks of one process share to reach each other. Ranks connect one by one; it lives as long as any of them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "clock.h"
#include "loopback_lane.h"
#include "program.h"
#include "transport.h"

namespace fastpipe {

class LoopbackHub final : public TransportSource, public std::enable_shared_from_this<LoopbackHub> {
 public:
  // lanes: that of each channel, by its index. delay_seconds: how long a send waits before it can be executed.
  LoopbackHub(std::vector<Channel> channels, std::vector<std::int32_t> lanes, double delay_seconds);

  std::unique_ptr<Transport> connect(const RankProgram& program, double timeout_seconds) override;
  LoopbackLane& lane_of(std::int32_t channel) { return *lanes_[lane_numbers_[channel]]; }
  Clock::duration delay() const { return delay_; }
  // Breaks every lane between two ranks.
  void break_off(std::int32_t one, std::int32_t other, const std::string& why);

 private:
  std::vector<Channel> channels_;
  std::vector<std::int32_t> lane_numbers_;
  std::vector<std::unique_ptr<LoopbackLane>> lanes_;
  Clock::duration delay_;
};

}  // namespace fastpipe
