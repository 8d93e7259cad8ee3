// Nodes of autograd's graph, whichever torch this is.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace fastpipe {

// torch::autograd nodes are held by intrusive_ptr from torch 2.13 on, by shared_ptr before.
using NodePtr = std::decay_t<decltype(std::declval<torch::autograd::Edge>().function)>;

inline constexpr bool kSharedNodes = std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>;

// The pointer to a node of a known kind.
template <typename Node>
using SharedNode = std::conditional_t<kSharedNodes, std::shared_ptr<Node>, c10::intrusive_ptr<Node>>;

template <typename Node, typename... Arguments>
SharedNode<Node> make_node(Arguments&&... arguments) {
  if constexpr (kSharedNodes) {
    return std::make_shared<Node>(std::forward<Arguments>(arguments)...);
  } else {
    return c10::make_intrusive<Node>(std::forward<Arguments>(arguments)...);
  }
}

}  // namespace fastpipe
