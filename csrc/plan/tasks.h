// Tasks: the actions of a schedule as the planner's search sees them. Numbers, and what waits for what; nothing of
// stages and microbatches. fastpipe/planner/tasks.py makes them and says what each field is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "plan/plan.h"

namespace fastpipe::plan {

constexpr int32_t kNobody = -1;

// Rows of numbers of different length.
class Lists {
 public:
  Lists() = default;
  explicit Lists(size_t rows) : first_(rows + 1, 0) {}
  const int32_t* begin(int32_t row) const { return items_.data() + first_[row]; }
  const int32_t* end(int32_t row) const { return items_.data() + first_[row + 1]; }

  // Row a holds every b with an edge a -> b, in the order of `each`, which calls its argument with every edge twice.
  template <typename Each>
  static Lists of(size_t rows, const Each& each) {
    Lists lists(rows);
    each([&](int32_t a, int32_t) { ++lists.first_[a + 1]; });
    for (size_t row = 0; row < rows; ++row) lists.first_[row + 1] += lists.first_[row];
    lists.items_.resize(lists.first_[rows]);
    std::vector<int32_t> next(lists.first_.begin(), lists.first_.end() - 1);
    each([&](int32_t a, int32_t b) { lists.items_[next[a]++] = b; });
    return lists;
  }

 private:
  std::vector<int32_t> first_;
  std::vector<int32_t> items_;
};

// What is looked up of a task over and over, side by side.
struct Task {
  double seconds;
  double transfer[2];
  int32_t source[2];
  int32_t consumers[2];  // on other ranks: what a forward and what a backward hands on
  int32_t num_consumers;
  int32_t rank;
};

// The consumers of every task, as rows.
class Consumers {
 public:
  explicit Consumers(const std::vector<Task>& rows) : rows_(rows) {}
  const int32_t* begin(int32_t task) const { return rows_[task].consumers; }
  const int32_t* end(int32_t task) const { return rows_[task].consumers + rows_[task].num_consumers; }

 private:
  const std::vector<Task>& rows_;
};

class Tasks {
 public:
  explicit Tasks(const PlanTasks& given);

  int32_t num_ranks() const { return given_.num_ranks; }
  int32_t size() const { return given_.num_tasks; }
  int32_t first(int32_t rank) const { return given_.first[rank]; }
  int32_t last(int32_t rank) const { return given_.first[rank + 1]; }
  int32_t rank_of(int32_t task) const { return rows_[task].rank; }
  double seconds(int32_t task) const { return rows_[task].seconds; }
  int32_t source(int32_t task, int part) const { return rows_[task].source[part]; }
  double transfer(int32_t task, int part) const { return rows_[task].transfer[part]; }
  double take(int32_t task) const { return given_.take[task]; }
  double give(int32_t task) const { return given_.give[task]; }
  double limit(int32_t rank) const { return given_.limit[rank]; }
  int32_t next(int32_t task) const { return given_.next[task]; }
  const Lists& before() const { return before_; }  // on the same rank
  const Lists& after() const { return after_; }    // on the same rank
  Consumers consumers() const { return Consumers(rows_); }

 private:
  const PlanTasks& given_;
  std::vector<Task> rows_;
  Lists before_;
  Lists after_;
};

}  // namespace fastpipe::plan
