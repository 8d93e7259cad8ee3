// When the rounds of a compact wave start, by beam search: fastpipe/schedules/wave_ticks.py, sooner, and number by
// number the same.
#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "plan/plan.h"

namespace fastpipe::plan {

namespace {

constexpr int32_t kNone = -1;
constexpr int32_t kMaxDuplicates = 3;

// One thing that a tick could be given to: a round, the W of one (`kinds`), or nothing (`kinds` + 1).
struct Choice {
  int64_t score;
  int32_t idle;
  int32_t from;  // the beginning that goes on
  int32_t kind;
  bool operator<(const Choice& other) const {
    return std::tie(other.score, idle, from, kind) < std::tie(score, other.idle, other.from, other.kind);
  }
};

// The beginnings of a tick, each in one row: what has started of every kind, W, what has ended, what is running.
class Beginnings {
 public:
  Beginnings(int32_t kinds, int32_t ranks) : kinds_(kinds), size_(2 * kinds + 1 + ranks), ranks_(ranks) {}

  void clear() {
    rows_.clear();
    choices_.clear();
  }
  int32_t count() const { return static_cast<int32_t>(choices_.size()); }
  void add_empty() {
    choices_.push_back({0, 0, kNone, kNone});
    rows_.assign(size_, 0);
    std::fill_n(running(0), ranks_, kNone);
  }
  void add(const Beginnings& others, const Choice& choice, int32_t slot) {
    const int32_t* from = others.rows_.data() + static_cast<size_t>(choice.from) * size_;
    rows_.insert(rows_.end(), from, from + size_);
    choices_.push_back(choice);
    if (choice.kind <= kinds_) ++started(count() - 1)[choice.kind];
    running(count() - 1)[slot] = choice.kind < kinds_ ? choice.kind : kNone;
  }
  void drop_last() {
    rows_.resize(rows_.size() - size_);
    choices_.pop_back();
  }
  int32_t* started(int32_t row) { return rows_.data() + static_cast<size_t>(row) * size_; }
  int32_t weights(int32_t row) { return started(row)[kinds_]; }
  int32_t* ended(int32_t row) { return started(row) + kinds_ + 1; }
  int32_t* running(int32_t row) { return ended(row) + kinds_; }
  const std::vector<Choice>& choices() const { return choices_; }

  bool has_started_the_same(int32_t row, int32_t other) {
    return std::equal(started(row), started(row) + kinds_ + 1, started(other));
  }
  bool runs_the_same(int32_t row, int32_t other) {
    return std::equal(running(row), running(row) + ranks_, running(other));
  }

 private:
  int32_t kinds_;
  size_t size_;
  int32_t ranks_;
  std::vector<int32_t> rows_;
  std::vector<Choice> choices_;
};

class Beam {
 public:
  Beam(const PlanBeam& given, int64_t length)
      : given_(given),
        kinds_(2 * given.num_rounds),
        count_(int64_t{given.num_rounds} * given.num_microbatches),
        ticks_((length - given.num_ranks + 1) / 2),
        last_input_(length < 2 * given.num_ranks + 1 ? kNone : (length - 2 * given.num_ranks - 1) / 2),
        spare_(ticks_ - 3 * count_),
        alive_(kinds_, given.num_ranks),
        next_(kinds_, given.num_ranks) {}

  // The ticks that the starts take, 0 where none were found.
  int64_t run(int64_t& budget, int64_t* ticks, int32_t* keys) {
    alive_.add_empty();
    for (int64_t tick = 0; spare_ >= 0 && tick < ticks_; ++tick) {
      choices_.clear();
      for (int32_t row = 0; row < alive_.count(); ++row) choose(row, tick);
      budget -= static_cast<int64_t>(choices_.size());
      if (budget < 0 || choices_.empty()) break;
      std::sort(choices_.begin(), choices_.end());
      const int32_t done = keep_best(static_cast<int32_t>(tick % given_.num_ranks));
      trail_.push_back(alive_.choices());
      if (done != kNone) return write(done, ticks, keys);
    }
    budget = std::max<int64_t>(0, budget);
    return 0;
  }

 private:
  int64_t worth(int32_t kind) const { return kind >= given_.num_rounds && kind < kinds_ ? kind + 1 : 0; }

  void choose(int32_t row, int64_t tick) {
    const int32_t over = alive_.running(row)[tick % given_.num_ranks];
    if (over != kNone) ++alive_.ended(row)[over];
    const int32_t* started = alive_.started(row);
    const int32_t* ended = alive_.ended(row);
    const Choice& so_far = alive_.choices()[row];
    int64_t forwards = 0;
    int64_t inputs = 0;
    for (int32_t kind = 0; kind < kinds_; ++kind) (kind < given_.num_rounds ? forwards : inputs) += started[kind];
    const bool free = forwards - alive_.weights(row) < given_.limit / 2;
    for (int32_t kind = 0; kind < kinds_; ++kind) {
      const int32_t before = kind == 0 ? given_.num_microbatches : ended[kind - 1];
      const bool allowed = kind < given_.num_rounds ? free : tick <= last_input_;
      if (allowed && started[kind] < before) choices_.push_back({so_far.score + worth(kind), so_far.idle, row, kind});
    }
    if (alive_.weights(row) < inputs) choices_.push_back({so_far.score, so_far.idle, row, kinds_});
    if (so_far.idle < spare_) choices_.push_back({so_far.score, so_far.idle + 1, row, kinds_ + 1});
  }

  // The first that is complete, or none.
  int32_t keep_best(int32_t slot) {
    next_.clear();
    for (const Choice& choice : choices_) {
      next_.add(alive_, choice, slot);
      if (is_one_too_many()) next_.drop_last();
      if (next_.count() == given_.width) break;
    }
    std::swap(alive_, next_);
    for (int32_t row = 0; row < alive_.count(); ++row) {
      if (alive_.weights(row) == count_) return row;
    }
    return kNone;
  }

  // Whether the last one is like others that are kept. Those have its score and its empty ticks, so they come just
  // before it.
  bool is_one_too_many() {
    const std::vector<Choice>& kept = next_.choices();
    const int32_t last = next_.count() - 1;
    int32_t duplicates = 0;
    for (int32_t row = last - 1; row >= 0; --row) {
      if (kept[row].score != kept[last].score || kept[row].idle != kept[last].idle) return false;
      if (!next_.has_started_the_same(row, last)) continue;
      if (++duplicates == kMaxDuplicates || next_.runs_the_same(row, last)) return true;
    }
    return false;
  }

  int64_t write(int32_t row, int64_t* ticks, int32_t* keys) const {
    std::vector<int32_t> chosen(trail_.size());
    for (size_t tick = trail_.size(); tick-- > 0; row = trail_[tick][row].from) chosen[tick] = trail_[tick][row].kind;
    std::vector<int32_t> number(kinds_, 0);
    int64_t written = 0;
    for (size_t tick = 0; tick < chosen.size(); ++tick) {
      const int32_t kind = chosen[tick];
      if (kind >= kinds_) continue;
      ticks[written] = static_cast<int64_t>(tick);
      keys[written++] = kind * given_.num_microbatches + number[kind]++;
    }
    return static_cast<int64_t>(chosen.size());
  }

  const PlanBeam& given_;
  const int32_t kinds_;
  const int64_t count_;  // rounds of F, of I, and their W
  const int64_t ticks_;
  const int64_t last_input_;
  const int64_t spare_;  // ticks that may stay empty
  Beginnings alive_;
  Beginnings next_;
  std::vector<Choice> choices_;
  std::vector<std::vector<Choice>> trail_;
};

}  // namespace

}  // namespace fastpipe::plan

extern "C" int64_t fastpipe_plan_beam(const PlanBeam* given, int64_t length, int64_t* budget, int64_t* ticks,
                                      int32_t* keys) {
  return fastpipe::plan::guarded<int64_t>(
      -1, [&] { return fastpipe::plan::Beam(*given, length).run(*budget, ticks, keys); });
}
