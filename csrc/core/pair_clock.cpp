#include "pair_clock.h"

#include <algorithm>

namespace fastpipe {

void PairClock::note(bool together, double seconds) {
  if (left_ > 0) {
    --left_;
    return;
  }
  Samples& samples = together ? together_ : in_order_;
  if (samples.count < kSamples) samples.seconds[samples.count++] = seconds;
  if (in_order_.count < kSamples || together_.count < kSamples) return;
  best_ = together_.median() < in_order_.median();
  left_ = kept_;
  kept_ = std::min(2 * kept_, kKept);
  in_order_.count = together_.count = 0;
}

double PairClock::Samples::median() {
  std::sort(seconds.begin(), seconds.end());
  return (seconds[(kSamples - 1) / 2] + seconds[kSamples / 2]) / 2;
}

}  // namespace fastpipe
