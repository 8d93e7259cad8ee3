#include "weight_source.h"

#include <utility>

#include "linear_node.h"

namespace fastpipe {

namespace {

std::int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor._version();
}

void require_version(const at::Tensor& tensor, std::int64_t version, const char* what) {
  TORCH_CHECK(
      version_of(tensor) == version, "the ", what, " of a linear, ", tensor.toString(), " ", tensor.sizes(),
      ", was changed in place between I, which left it for the weight's gradient, and W: it is at version ",
      version_of(tensor), " instead of ", version,
      "; do not write to it again, clone it before the linear, or use a schedule that does not split backwards");
}

at::Tensor gradient_of(const WeightUse& use) {
  use.require_unchanged();
  return weight_gradient(use.input, use.gradient, use.weight_by_rows);
}

}  // namespace

WeightUse::WeightUse(at::Tensor input, at::Tensor gradient, bool weight_by_rows)
    : input(std::move(input)),
      gradient(std::move(gradient)),
      weight_by_rows(weight_by_rows),
      input_version(version_of(this->input)),
      gradient_version(version_of(this->gradient)) {}

void WeightUse::require_unchanged() const {
  require_version(input, input_version, "input");
  require_version(gradient, gradient_version, "output's gradient");
}

WeightSource::WeightSource(std::uint64_t sequence, torch::autograd::Edge weight, WeightUses uses)
    : Node(sequence, {std::move(weight)}), uses_(std::move(uses)) {}

torch::autograd::variable_list WeightSource::apply(torch::autograd::variable_list&&) {
  const WeightUses uses = std::exchange(uses_, {});
  at::Tensor sum = gradient_of(uses.front());
  for (std::size_t i = 1; i < uses.size(); ++i) sum.add_(gradient_of(uses[i]));
  return {std::move(sum)};
}

}  // namespace fastpipe
