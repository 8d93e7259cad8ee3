#include "pair_clock.h"

#include <algorithm>

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

}  // namespace fastpipe
