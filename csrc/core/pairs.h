// Pairs of a forward and a backward that overlap: which way they run; fastpipe/runtime/pairs.py has the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>

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
  explicit Pairs(PairWay way) : way_(way) {}

  // When both parts fail, the forward's error is thrown.
  void run(const PairPart& forward, const PairPart& backward, std::size_t position, Observer& observer);
  const PairCounts& counts() const { return counts_; }

 private:
  void in_order(const PairPart& forward, const PairPart& backward);
  void together(const PairPart& forward, const PairPart& backward, std::size_t position, Observer& observer);

  PairWay way_;
  PairCounts counts_;
  std::map<std::pair<const Stage*, const Stage*>, PairClock> clocks_;  // as many as there are pairs of stages
  std::unique_ptr<Helper> helper_;                                     // made when it is needed
};

}  // namespace fastpipe
