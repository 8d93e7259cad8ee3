// From a schedule to a program. The meaning is that of fastpipe/lower.py.
#include <exception>
#include <memory>
#include <vector>

#include "plan/emitter.h"
#include "plan/flow.h"

namespace fastpipe::plan {
namespace {

// What is known before the instructions are written; they go straight into the caller's arrays.
struct Lowered {
  explicit Lowered(const PlanOrders& given) : given(given), orders(this->given), flow(orders) {}
  const PlanOrders given;  // the arrays it points to must outlive it
  const Orders orders;
  Flow flow;
  std::vector<int64_t> counts;
  int32_t bounded = 0;
};

std::unique_ptr<Lowered> lower(const PlanOrders& given, int32_t ahead, int32_t bounded) {
  auto lowered = std::make_unique<Lowered>(given);
  if (!lowered->flow.build()) return nullptr;
  lowered->flow.place_receives(ahead);
  lowered->counts = lowered->flow.counts();
  lowered->bounded = bounded;
  return lowered;
}

}  // namespace
}  // namespace fastpipe::plan

using fastpipe::plan::Channel;
using fastpipe::plan::Emitter;
using fastpipe::plan::Lowered;

extern "C" {

void* fastpipe_plan_lower(const PlanOrders* orders, int32_t ahead, int32_t bounded) {
  try {
    return fastpipe::plan::lower(*orders, ahead, bounded).release();
  } catch (const std::exception&) {
    return nullptr;
  }
}

int32_t fastpipe_plan_num_channels(const void* lowered) {
  return static_cast<int32_t>(static_cast<const Lowered*>(lowered)->flow.channels().size());
}

void fastpipe_plan_channels(const void* lowered, int32_t* out) {
  for (const Channel& channel : static_cast<const Lowered*>(lowered)->flow.channels()) {
    *out++ = channel.source;
    *out++ = channel.destination;
    *out++ = channel.kind;
  }
}

int64_t fastpipe_plan_num_instructions(const void* lowered, int32_t rank) {
  return static_cast<const Lowered*>(lowered)->counts[rank];
}

int32_t fastpipe_plan_write(void* lowered, int32_t rank, int32_t* out) {
  auto* self = static_cast<Lowered*>(lowered);
  try {
    return Emitter(self->flow, rank, self->bounded, out, self->counts[rank]).run();
  } catch (const std::exception&) {
    return 0;
  }
}

void fastpipe_plan_free(void* lowered) {
  delete static_cast<Lowered*>(lowered);
}

int32_t fastpipe_plan_version() {
  return 8;
}
}
