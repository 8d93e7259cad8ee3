// A program with its references resolved, so that the loop looks nothing up.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "program.h"
#include "stage.h"
#include "transport.h"

namespace fastpipe {

// The stages of a rank by the model's stage index; null where the stage is on another rank.
using Stages = std::vector<std::unique_ptr<Stage>>;

struct Step {
  Op op;
  std::int32_t microbatch;
  std::int32_t pair_microbatch;
  std::int32_t slot;
  // Where a compute action finds its input and its gradient; kNone on the first and the last stage.
  std::int32_t input_slot;
  std::int32_t gradient_slot;
  std::int32_t pair;  // of an OVERLAP_F_B: the number of its two stages, from 0; else kNone
  ChannelKind kind;
  Stage* stage;       // who computes, produces what is sent or handed over, or consumes what is received
  Stage* pair_stage;  // whose backward an OVERLAP_F_B runs
  Transfer transfer;  // for WAIT_SEND: that of its SEND
};

// Throws ArgumentError for an instruction that names a stage, slot or send that is not there.
std::vector<Step> resolve(const RankProgram& program, const Stages& stages);

}  // namespace fastpipe
