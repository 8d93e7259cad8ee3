// Where a weight's deferred gradient enters the graph.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>

#include "node.h"

namespace fastpipe {

// What one linear leaves for W.
struct WeightUse {
  WeightUse(at::Tensor input, at::Tensor gradient, bool weight_by_rows);

  // Throws if one of them has been changed in place since: a whole backward would have read it before.
  void require_unchanged() const;

  at::Tensor input;
  at::Tensor gradient;  // of the output
  bool weight_by_rows;
  std::int64_t input_version;
  std::int64_t gradient_version;
};
// A weight has one use in most models.
using WeightUses = c10::SmallVector<WeightUse, 1>;

// Computes only when the engine comes to it, and hands its result on without keeping it: as many gradients are alive
// at a time as in a whole backward, and `.grad` takes over the very memory.
class WeightSource final : public torch::autograd::Node {
 public:
  // sequence: the place in the order of the forward that its linear had.
  WeightSource(std::uint64_t sequence, torch::autograd::Edge weight, WeightUses uses);

  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override;

 private:
  WeightUses uses_;
};

}  // namespace fastpipe
