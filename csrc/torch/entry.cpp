#include "entry.h"

#include <c10/util/intrusive_ptr.h>

#include <memory>

namespace fastpipe {

namespace {

// A template, so that the branch for the other torch is not compiled.
template <typename Pointer, typename Node>
Pointer make_node() {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return std::make_shared<Node>();
  } else {
    return c10::make_intrusive<Node>();
  }
}

}  // namespace

NodePtr Entry::make() {
  return make_node<NodePtr, Entry>();
}

torch::autograd::variable_list Entry::apply(torch::autograd::variable_list&& gradients) {
  caught_ = std::move(gradients);
  return {};
}

at::Tensor enter(const at::Tensor& tensor, const NodePtr& entry) {
  at::Tensor entered = tensor.detach();
  torch::autograd::create_gradient_edge(entered, entry);
  return entered;
}

}  // namespace fastpipe
