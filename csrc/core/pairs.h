// Pairs of a forward and a backward that overlap: which way they run; fastpipe/runtime/pairs.py has the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "helper.h"
#include "observer.h"
#include "pair_clock.h"
#include "payload.h"
#include "stage.h"

namespace fastpipe {

enum class PairWay : std::int32_t { kInOrder = 0, kTogether, kMeasured };

struct PairCounts {
  std::int64_t together = 0;
  std::int64_t in_order = 0;
  std::int64_t fused = 0;
};

// One half of a pair.
struct PairPart {
  Stage& stage;
  std::int32_t microbatch;
  const Payload* given;  // the forward's input or the backward's gradient; null where there is none
};

class Pairs {
 public:
  // num_pairs: how many different pairs of stages there are.
  Pairs(PairWay way, std::size_t num_pairs) : way_(way), clocks_(num_pairs) {}

  // pair: the number of its stages. When both parts fail, the forward's error is thrown.
  void run(std::int32_t pair, const PairPart& forward, const PairPart& backward, std::size_t position,
           Observer& observer);
  const PairCounts& counts() const { return counts_; }

 private:
  void in_order(const PairPart& forward, const PairPart& backward);
  void together(const PairPart& forward, const PairPart& backward, std::size_t position, Observer& observer);

  PairWay way_;
  PairCounts counts_;
  std::vector<PairClock> clocks_;   // by the pair's number
  std::unique_ptr<Helper> helper_;  // made when it is needed
};

}  // namespace fastpipe
