// Something that a thread is told while it lasts.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>

namespace fastpipe {

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

}  // namespace fastpipe
