// Which action this thread computes, and the engine's threads that work for it: what fastpipe.current() tells.
#pragma once

#include <array>
#include <cstdint>

#include "core/program.h"
#include "thread_note.h"

namespace fastpipe {

class Moment final : public c10::DebugInfoBase {
 public:
  // Of one stage in one step.
  struct Step {
    std::int64_t number = 0;
    // The microbatches of the stage's last F, last B or I, and last W; fastpipe/runtime/current.py finds them.
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
