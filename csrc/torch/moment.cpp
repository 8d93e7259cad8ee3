#include "moment.h"

#include <c10/core/GradMode.h>

namespace fastpipe {

Moment::Moment(const Step& step, Op op, std::int32_t stage, std::int32_t microbatch)
    : step_(step),
      op_(op),
      stage_(stage),
      microbatch_(microbatch),
      training_(op != Op::kF || c10::GradMode::is_enabled()),
      note_(c10::DebugInfoKind::TEST_INFO, *this) {}

const Moment* Moment::current() {
  return static_cast<const Moment*>(c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::TEST_INFO));
}

bool Moment::is_last_microbatch() const {
  const std::size_t kind = op_ == Op::kF ? 0 : op_ == Op::kW ? 2 : 1;
  return step_.last.at(kind) == microbatch_;
}

}  // namespace fastpipe
