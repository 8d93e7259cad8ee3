// The weight gradients of one microbatch of one stage, between its F, its I and its W.
#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/edge.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "linear_node.h"
#include "node.h"
#include "recompute_group.h"
#include "weight_source.h"

namespace fastpipe {

// F: every linear becomes a LinearNode, whole. When F has ended, the graph tells which weights reach it by linears
// alone; these linears are deferred. I queues their inputs and output gradients; W computes, and enters the graph at
// the weights. (A linear that makes another's weight is whole: W comes to it through that weight.) Nothing is
// remembered from one microbatch to the next, so a model may change as it likes.
class WeightGradients {
 public:
  // fused: W adds to `.grad` by the matrix products themselves, where that can be; see fused_accumulation.h.
  explicit WeightGradients(bool fused) : fused_(fused) {}

  using Edge = torch::autograd::Edge;
  using Edges = torch::autograd::edge_list;
  using LinearPtr = SharedNode<LinearNode>;

  // In F: a linear has entered the graph.
  void created(LinearPtr linear);
  // At the end of F. `inputs`: where the stage's inputs enter; what depends on them can not wait.
  void split(const Edges& outputs, c10::ArrayRef<torch::autograd::Node*> inputs);
  // In I, for a linear that a reentrant checkpoint recomputes: whether its weight may wait.
  bool may_wait_recomputed(const Edge& weight) const;
  // For I and W: there is one if a weight that waits is made of parameters, and may be recomputed.
  const std::optional<RecomputeGroup>& group() const { return group_; }
  // In I.
  void add(const Edge& weight, std::uint64_t sequence, WeightUse use);
  // W.
  void compute();
  // Lets go of all, after a failure or a forward that was given up.
  void clear() noexcept;

  // The memory that waits for W.
  std::size_t held_bytes();
  // The leaves whose gradients wait for W, parameters as a rule: names only (Python's `_cdata`), which keep nothing
  // alive.
  std::vector<std::uintptr_t> leaves() const;

 private:
  using Node = torch::autograd::Node;

  struct Pending {
    Edge weight;
    int task;  // the engine's run: what a nested one found is added to `.grad` by itself, and so it is here
    std::uint64_t sequence;
    WeightUses uses;
  };

  void keep(Node* node);
  void keep_shared();
  bool separate(const Edge& weight) const;
  void run(std::size_t first, std::size_t last);

  bool fused_;
  std::vector<LinearPtr> linears_;
  bool in_checkpoint_ = false;  // a linear of this F was
  std::optional<RecomputeGroup> group_;
  ska::flat_hash_set<Node*> kept_;  // the nodes that I goes through
  std::vector<Node*> stack_;
  std::vector<Pending> pending_;  // those of one run of the engine side by side
  // Kept for their memory.
  Edges roots_;
  std::vector<at::Tensor> starts_;
  ska::flat_hash_set<const void*> storages_;
};

}  // namespace fastpipe
