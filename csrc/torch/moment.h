// What this thread, and the engine's threads that work for it, are told while something lasts.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <array>
#include <cstdint>
#include <memory>

#include "core/program.h"

namespace fastpipe {

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
