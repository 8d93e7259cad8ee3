// Several runs of torch's engine that belong together: what a checkpoint recomputed in one, the others have.
#pragma once

#include <c10/core/SafePyObject.h>

#include <optional>

namespace fastpipe {

// Whether what autograd saves now may be computed again, as far as can be told: something is done to it.
bool in_checkpoint();

// What I and W of one microbatch are to torch's checkpoints without reentrance, which would recompute for every run.
class RecomputeGroup {
 public:
  // Takes the GIL, and so does every run of the engine within it: there is one only where it may be needed.
  RecomputeGroup();

  const c10::SafePyObject& object() const { return object_; }

 private:
  c10::SafePyObject object_;
};

// This thread runs the engine for a group, from its beginning to its end.
class InRecomputeGroup {
 public:
  explicit InRecomputeGroup(const RecomputeGroup& group);
  InRecomputeGroup(const InRecomputeGroup&) = delete;
  InRecomputeGroup& operator=(const InRecomputeGroup&) = delete;
  ~InRecomputeGroup();

 private:
  std::optional<c10::SafePyObject> before_;
};

}  // namespace fastpipe
