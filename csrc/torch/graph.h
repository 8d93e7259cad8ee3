// torch's autograd: nodes of its graph whichever torch this is, where tensors enter it, runs of its engine, and what
// the engine's threads are told while something lasts.
#pragma once

#include <c10/core/SafePyObject.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/program.h"

namespace fastpipe {

// Nodes of autograd's graph, whichever torch this is.

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

// Where received tensors enter a stage's graph.

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

// torch's autograd engine, as stages and weight gradients run it.

// Adds to the leaves' `.grad`; the graph it went through is used up.
void run_engine(const torch::autograd::edge_list& roots, const std::vector<at::Tensor>& gradients);

// Several runs of torch's engine that belong together: what a checkpoint recomputed in one, the others have.

// Whether what autograd saves now may be computed again, as far as can be told: something is done to it.
bool in_checkpoint();

// What I and W of one microbatch are to torch's checkpoints without reentrance, which would recompute for every run.
class RecomputeGroup {
 public:
  // Takes the GIL, and so does every run of the engine within it: there is one only where it may be needed.
  RecomputeGroup();

  const c10::SafePyObject& object() const { return object_; }

 private:
  c10::SafePyObject object_;
};

// This thread runs the engine for a group, from its beginning to its end.
class InRecomputeGroup {
 public:
  explicit InRecomputeGroup(const RecomputeGroup& group);
  InRecomputeGroup(const InRecomputeGroup&) = delete;
  InRecomputeGroup& operator=(const InRecomputeGroup&) = delete;
  ~InRecomputeGroup();

 private:
  std::optional<c10::SafePyObject> before_;
};

// Something that a thread is told while it lasts.

// The one kind of thread-local state that the engine hands to its threads, and that is free for others than torch:
// what those threads do for this one ends before the note does. So nobody shares in owning what is noted, which then
// needs no memory of its own.
class ThreadNote {
 public:
  ThreadNote(c10::DebugInfoKind kind, c10::DebugInfoBase& noted)
      : guard_(kind, std::shared_ptr<c10::DebugInfoBase>(std::shared_ptr<void>(), &noted)) {}

 private:
  c10::DebugInfoGuard guard_;
};

// Which action this thread computes, and the engine's threads that work for it: what fastpipe.current() tells.
class Moment final : public c10::DebugInfoBase {
 public:
  // Of one stage in one step.
  struct Step {
    std::int64_t number = 0;
    // The microbatches of the stage's last F, last B or I, and last W; fastpipe/runtime/stage/context.py finds them.
    std::array<std::int32_t, 3> last{};
  };

  Moment(const Step& step, Op op, std::int32_t stage, std::int32_t microbatch);

  // What this thread computes; null when it computes nothing.
  static const Moment* current();

  std::int64_t step() const { return step_.number; }
  std::int32_t stage() const { return stage_; }
  std::int32_t microbatch() const { return microbatch_; }
  Op op() const { return op_; }
  bool is_last_microbatch() const;
  bool training() const { return training_; }

 private:
  const Step& step_;
  Op op_;
  std::int32_t stage_;
  std::int32_t microbatch_;
  bool training_;
  ThreadNote note_;
};

}  // namespace fastpipe
