#include "weight_source.h"

#include <utility>

#include "linear_node.h"

namespace fastpipe {

namespace {

at::Tensor gradient_of(const WeightUse& use) {
  return weight_gradient(use.input, use.gradient, use.weight_by_rows);
}

}  // namespace

WeightSource::WeightSource(std::uint64_t sequence, torch::autograd::Edge weight, WeightUses uses)
    : Node(sequence, {std::move(weight)}), uses_(std::move(uses)) {}

torch::autograd::variable_list WeightSource::apply(torch::autograd::variable_list&&) {
  const WeightUses uses = std::exchange(uses_, {});
  at::Tensor sum = gradient_of(uses.front());
  for (std::size_t i = 1; i < uses.size(); ++i) sum.add_(gradient_of(uses[i]));
  return {std::move(sum)};
}

}  // namespace fastpipe
