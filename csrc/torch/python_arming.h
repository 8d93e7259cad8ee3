// Arming as a context of Python's.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <utility>

#include "arming.h"

namespace fastpipe {

// For Python's `with`: armed from its beginning to its end.
class PythonArming {
 public:
  PythonArming(std::shared_ptr<WeightGradients> weights, Arming::Phase phase)
      : weights_(std::move(weights)), phase_(phase) {}
  void enter() { arming_.emplace(weights_, phase_); }
  void exit(const py::args&) { arming_.reset(); }

 private:
  std::shared_ptr<WeightGradients> weights_;
  Arming::Phase phase_;
  std::optional<Arming> arming_;
};

}  // namespace fastpipe
