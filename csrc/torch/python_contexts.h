// What a thread is told while something runs in it, as contexts of Python's.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "arming.h"
#include "moment.h"

namespace fastpipe {

// Armed from the beginning of Python's `with` to its end.
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

// Computes an action.
class PythonMoment {
 public:
  PythonMoment(std::int64_t number, std::array<std::int32_t, 3> last, int op, std::int32_t stage,
               std::int32_t microbatch)
      : step_{number, last}, op_(static_cast<Op>(op)), stage_(stage), microbatch_(microbatch) {}
  void enter() { moment_.emplace(step_, op_, stage_, microbatch_); }
  void exit(const py::args&) { moment_.reset(); }

 private:
  Moment::Step step_;
  Op op_;
  std::int32_t stage_;
  std::int32_t microbatch_;
  std::optional<Moment> moment_;
};

}  // namespace fastpipe
