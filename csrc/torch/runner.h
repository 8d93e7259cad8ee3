// One rank's executor as Python holds it.
#pragma once

#include <ATen/ThreadLocalState.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/common.h"
#include "core/executor.h"
#include "stage.h"
#include "streams.h"
#include "torch_private.h"

namespace fastpipe {

// Index, whether it is first, whether it is last, and fused_weight_grad.
using StagePlace = std::tuple<std::int32_t, bool, bool, bool>;

// It holds no Python object between steps: the callables come with each step, so no cycle can run through it.
class Runner final : public Observer {
 public:
  // streams: one for each stage, or none.
  Runner(const RankProgram& program, const std::vector<StagePlace>& stages, const Connect& connect,
         double timeout_seconds, at::Device device, PairWay pairs, std::vector<c10::Stream> streams);
  // With the GIL held.
  ~Runner() override;

  // calls: (run, output_grads, guard, run_collective, fold, fuse, partners, last_backward, around, moment: the number
  // of the step and the stage's last microbatches, exchanges: whether its forward calls all_to_all, knows_deferred) of
  // each stage, in the constructor's order; None for what is not wanted. in_turns: (forward, backward, whether that
  // begins) runs a pair in turns. Returns (start, end), or None when the step failed on another rank; raises what
  // failed here. num_threads: of torch's operators; 0 leaves it. trace: the times are those of the device, for which
  // the host waits. drain: nothing is computed, and stand-ins are sent: the step has failed here before its first
  // instruction. while_waiting: called before the instruction at wait_at, unless the step has failed.
  py::object run(std::int64_t signature, bool announce, const std::vector<py::tuple>& calls,
                 const py::object& on_failure, int num_threads, bool trace, bool drain, const py::object& in_turns,
                 std::size_t wait_at, const py::object& while_waiting);
  void fail() { executor_->fail(); }
  void forget_failure() { executor_->forget_failure(); }
  void drop_memory() { executor_->drop_memory(); }
  std::size_t position() const { return executor_->position(); }
  void check() const { executor_->check(); }
  const std::vector<TorchStage*>& stages() const { return stages_; }
  const PairCounts& pair_counts() const { return executor_->pair_counts(); }

  void starts(std::size_t position) override;
  void ends(std::size_t position) noexcept override;
  void run_overlapped(std::size_t position, FunctionRef<void()> backward) override;
  void run_in_turns(std::size_t position, FunctionRef<void()> forward, FunctionRef<void()> backward,
                    bool backward_first) override;
  void failed(std::size_t position, const std::exception_ptr& error) noexcept override;

 private:
  void bind(const std::vector<py::tuple>& calls);
  void set_times(bool trace);
  Outcome run_in_streams(std::int64_t signature, bool announce, double* start, double* end, bool drain);
  Outcome run_without_gil(std::int64_t signature, bool announce, double* start, double* end, bool drain);
  bool noted_here(std::size_t position) const;
  // That of a pair, on the caller's stream and under its label.
  void run_backward(std::size_t position, FunctionRef<void()> backward);

  std::vector<TorchStage*> stages_;                                   // owned by the executor
  std::vector<std::string> labels_;                                   // by position; empty where no label is wanted
  std::unordered_map<std::size_t, std::string> labels_of_backwards_;  // of pairs
  at::Device device_;
  StageStreams streams_;
  std::unique_ptr<Executor> executor_;
  std::optional<DeviceTimes> device_times_;  // made for the first step that is traced
  // Of the step that runs.
  py::handle on_failure_;
  py::handle in_turns_;
  std::size_t wait_at_ = 0;
  py::handle while_waiting_;  // null for none
  ProfilerRange label_;
  DeviceTimes* times_ = nullptr;  // null where the host's clock is asked
  // For the helper thread.
  bool helper_can_take_gil_ = false;  // when it ends
  std::optional<at::ThreadLocalState> state_;
  bool in_autocast_ = false;
  py::object context_;  // in a step, the caller's context variables; null if none is set
  int num_threads_ = 0;
};

}  // namespace fastpipe
