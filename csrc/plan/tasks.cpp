#include "plan/tasks.h"

#include <algorithm>
#include <stdexcept>

namespace fastpipe::plan {

Tasks::Tasks(const PlanTasks& given) : given_(given), rows_(given.num_tasks) {
  const auto count = static_cast<size_t>(given.num_tasks);
  for (int32_t rank = 0; rank < given.num_ranks; ++rank) {
    for (int32_t task = given.first[rank]; task < given.first[rank + 1]; ++task) {
      Task& row = rows_[task];
      row.rank = rank;
      row.seconds = given.seconds[task];
      std::copy_n(given.transfer + 2 * task, 2, row.transfer);
      std::copy_n(given.source + 2 * task, 2, row.source);
    }
  }
  for (int32_t task = 0; task < given.num_tasks; ++task) {
    for (const int32_t source : rows_[task].source) {
      if (source == kNobody) continue;
      Task& row = rows_[source];
      if (row.num_consumers == 2) throw std::length_error("a task of more than two consumers");
      row.consumers[row.num_consumers++] = task;
    }
  }
  const auto local = [&](const auto& visit) {
    for (int32_t i = 0; i < given.num_local; ++i) visit(given.local[2 * i + 1], given.local[2 * i]);
  };
  const auto reversed = [&](const auto& visit) {
    for (int32_t i = 0; i < given.num_local; ++i) visit(given.local[2 * i], given.local[2 * i + 1]);
  };
  before_ = Lists::of(count, local);
  after_ = Lists::of(count, reversed);
}

}  // namespace fastpipe::plan
