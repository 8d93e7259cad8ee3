// While one exists, linears of this thread, and of the engine's threads that work for it, may defer their weights.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>

#include "weight_grad.h"

namespace fastpipe {

class Arming {
 public:
  // kFused: a forward in which another microbatch's backward runs. What that recomputes was not armed in its forward,
  // and must not be now: a checkpoint takes what is saved by its order.
  enum class Phase { kForward, kBackward, kFused };

  Arming(std::shared_ptr<WeightGradients> weights, Phase phase);

  // What this thread is armed with; null when it is not.
  static const Arming* current();

  Phase phase() const { return phase_; }
  const std::shared_ptr<WeightGradients>& weights() const { return weights_; }

 private:
  // The one kind of thread-local state that the engine hands to its threads and that is free for others.
  struct Carrier final : c10::DebugInfoBase {
    explicit Carrier(const Arming* arming) : arming(arming) {}
    const Arming* arming;
  };

  std::shared_ptr<WeightGradients> weights_;
  Phase phase_;
  c10::DebugInfoGuard guard_;
};

}  // namespace fastpipe
