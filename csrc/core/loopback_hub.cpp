#include "loopback_hub.h"

#include <algorithm>
#include <set>
#include <utility>

#include "errors.h"
#include "loopback.h"

namespace fastpipe {

namespace {

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

}  // namespace

LoopbackHub::LoopbackHub(std::vector<Channel> channels, std::vector<std::int32_t> lanes, double delay_seconds)
    : channels_(std::move(channels)), lane_numbers_(std::move(lanes)), delay_(as_duration(delay_seconds)) {
  if (lane_numbers_.size() != channels_.size()) {
    throw ArgumentError("lanes has " + std::to_string(lane_numbers_.size()) + " entries for " +
                        std::to_string(channels_.size()) + " channels; give one a channel");
  }
  require_pairs(channels_, lane_numbers_);
  for (std::size_t lane = 0; lane < lane_numbers_.size(); ++lane) lanes_.push_back(std::make_unique<LoopbackLane>());
}

std::unique_ptr<Transport> LoopbackHub::connect(const RankProgram& program, double timeout_seconds) {
  if (program.channels().size() != channels_.size()) {
    throw ArgumentError("this loopback was made for " + std::to_string(channels_.size()) +
                        " channels, the program has " + std::to_string(program.channels().size()) +
                        "; make a loopback for each program");
  }
  return std::make_unique<LoopbackTransport>(shared_from_this(), program, timeout_seconds);
}

void LoopbackHub::break_off(std::int32_t one, std::int32_t other, const std::string& why) {
  for (std::size_t channel = 0; channel < channels_.size(); ++channel) {
    const auto [source, destination, kind] = channels_[channel];
    if (std::minmax(source, destination) == std::minmax(one, other)) lane_of(channel).break_off(why);
  }
}

}  // namespace fastpipe
