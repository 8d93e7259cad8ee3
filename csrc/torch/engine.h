// torch's autograd engine, as stages and weight gradients run it.
#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/variable.h>

#include <vector>

namespace fastpipe {

// Adds to the leaves' `.grad`; the graph it went through is used up.
void run_engine(const torch::autograd::edge_list& roots, const std::vector<at::Tensor>& gradients);

}  // namespace fastpipe
