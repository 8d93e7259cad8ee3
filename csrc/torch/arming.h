// While one exists, linears of this thread, and of the engine's threads that work for it, may defer their weights.
#pragma once

#include <memory>
#include <optional>

#include "recompute_group.h"
#include "thread_note.h"
#include "weight_grad.h"

namespace fastpipe {

class Arming final : public c10::DebugInfoBase {
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
  std::shared_ptr<WeightGradients> weights_;
  Phase phase_;
  std::optional<InRecomputeGroup> group_;  // in I and W
  ThreadNote note_;
};

}  // namespace fastpipe
