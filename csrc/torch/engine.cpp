#include "engine.h"

#include <torch/csrc/autograd/engine.h>

#include "python_errors.h"

namespace fastpipe {

void run_engine(const torch::autograd::edge_list& roots, const std::vector<at::Tensor>& gradients) {
  constexpr bool kKeepGraph = false;
  constexpr bool kCreateGraph = false;
  constexpr bool kAccumulate = true;
  try {
    torch::autograd::Engine::get_default_engine().execute(roots, gradients, kKeepGraph, kCreateGraph, kAccumulate);
  } catch (python_error& error) {
    rethrow_for_pybind(error);
  }
}

}  // namespace fastpipe
