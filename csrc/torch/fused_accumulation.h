// Weight gradients that are added to `.grad` by the matrix product that makes them: C = A B + C.
#pragma once

#include <torch/csrc/autograd/edge.h>

#include "weight_source.h"

namespace fastpipe {

// Adds what the uses of one weight make to its parameter's gradient. False, and nothing done, where that is for the
// engine: no gradient to add to yet, one of another layout, a weight that is more than a parameter or its copy in
// another dtype, hooks that want to see a contribution, or operands of 16 bits where no product adds to 32.
// Post-accumulate hooks run.
bool accumulate_in_place(const torch::autograd::Edge& weight, const WeightUses& uses);

}  // namespace fastpipe
