// Where received tensors enter a stage's graph.
#pragma once

#include <utility>

#include "node.h"

namespace fastpipe {

// Catches the gradients as autograd made them. (Those of leaves would be laid out like the leaf; what the stage before
// computes from them could then differ, in its last bits, from the unsplit model.)
class Entry final : public torch::autograd::Node {
 public:
  static NodePtr make();

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  // By the order in which the tensors entered; empty when no gradient reached any of them.
  torch::autograd::variable_list take_caught() { return std::exchange(caught_, {}); }

 private:
  torch::autograd::variable_list caught_;
};

// The same memory (and the same count of in-place changes, so that these are found out) as an input of the graph.
at::Tensor enter(const at::Tensor& tensor, const NodePtr& entry);

}  // namespace fastpipe
