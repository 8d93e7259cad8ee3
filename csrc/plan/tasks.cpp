#include "plan/tasks.h"

namespace fastpipe::plan {

Tasks::Tasks(const PlanTasks& given) : given_(given), rank_(given.num_tasks) {
  const auto count = static_cast<size_t>(given.num_tasks);
  for (int32_t rank = 0; rank < given.num_ranks; ++rank) {
    for (int32_t task = given.first[rank]; task < given.first[rank + 1]; ++task) rank_[task] = rank;
  }
  const auto local = [&](const auto& visit) {
    for (int32_t i = 0; i < given.num_local; ++i) visit(given.local[2 * i + 1], given.local[2 * i]);
  };
  const auto reversed = [&](const auto& visit) {
    for (int32_t i = 0; i < given.num_local; ++i) visit(given.local[2 * i], given.local[2 * i + 1]);
  };
  const auto remote = [&](const auto& visit) {
    for (int32_t task = 0; task < given.num_tasks; ++task) {
      for (int part = 0; part < 2; ++part) {
        if (source(task, part) != kNobody) visit(source(task, part), task);
      }
    }
  };
  before_ = Lists::of(count, local);
  after_ = Lists::of(count, reversed);
  consumers_ = Lists::of(count, remote);
}

}  // namespace fastpipe::plan
