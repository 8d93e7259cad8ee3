#include "pairs.h"

#include <algorithm>
#include <exception>

#include "common.h"

namespace fastpipe {

bool PairClock::next() const {
  const bool together_first = num_rounds_ % 2 != 0;
  if (place_ == 0) return together_first;
  return place_ == 1 ? !together_first : best_;
}

void PairClock::note(double seconds) {
  if (place_ == 0) first_ = seconds;
  if (place_ == 1) vote(next() ? seconds < first_ : first_ < seconds);
  const std::size_t period = kPeriods[std::min(num_rounds_ / kVotes, kPeriods.size() - 1)];
  place_ = (place_ + 1) % period;
}

void PairClock::vote(bool together) {
  votes_ = votes_ << 1;
  votes_[0] = together;
  ++num_rounds_;
  const std::size_t all = std::min(num_rounds_, kVotes);
  if (2 * votes_.count() != all) best_ = 2 * votes_.count() > all;
}

void Pairs::run(std::int32_t pair, const PairPart& forward, const PairPart& backward, std::size_t position,
                Observer& observer) {
  if (forward.stage.fuse(forward.microbatch, forward.given, backward.stage, backward.microbatch, backward.given)) {
    ++counts_.fused;
    return;
  }
  if (way_ == PairWay::kInOrder || !forward.stage.may_run_beside(backward.stage)) return in_order(forward, backward);
  if (way_ == PairWay::kTogether) return together(forward, backward, position, observer);
  PairClock& clock = clocks_[pair];
  const double begin = now_seconds();
  if (clock.next()) {
    together(forward, backward, position, observer);
  } else {
    in_order(forward, backward);
  }
  clock.note(now_seconds() - begin);
}

void Pairs::in_order(const PairPart& forward, const PairPart& backward) {
  ++counts_.in_order;
  forward.stage.forward(forward.microbatch, forward.given);
  backward.stage.backward(backward.microbatch, backward.given);
}

void Pairs::together(const PairPart& forward, const PairPart& backward, std::size_t position, Observer& observer) {
  ++counts_.together;
  if (!helper_) helper_ = std::make_unique<Helper>();
  const auto part = [&backward] { backward.stage.backward(backward.microbatch, backward.given); };
  const auto job = [&] { observer.beside(position, part); };
  helper_->start(job);
  std::exception_ptr error;
  try {
    forward.stage.forward(forward.microbatch, forward.given);
  } catch (...) {
    error = std::current_exception();
  }
  const std::exception_ptr other = helper_->finish();
  if (error) std::rethrow_exception(error);
  if (other) std::rethrow_exception(other);
}

}  // namespace fastpipe
