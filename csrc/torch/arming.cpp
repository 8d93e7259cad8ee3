#include "arming.h"

#include <utility>

namespace fastpipe {

Arming::Arming(std::shared_ptr<WeightGradients> weights, Phase phase)
    : weights_(std::move(weights)),
      phase_(phase),
      guard_(c10::DebugInfoKind::TEST_INFO_2, std::make_shared<Carrier>(this)) {}

const Arming* Arming::current() {
  const auto* carrier = static_cast<const Carrier*>(c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::TEST_INFO_2));
  return carrier == nullptr ? nullptr : carrier->arming;
}

}  // namespace fastpipe
