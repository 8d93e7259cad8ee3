// Pairs of a forward and a backward: how one rank runs them, and which way is faster.
#pragma once

#include <array>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "common.h"
#include "stage.h"
#include "transport.h"

namespace fastpipe {

// Which way the pairs of two stages go.

// Two pairs in a row that go one way each are a round, and the faster way has its vote: what disturbs the machine for
// longer than a pair disturbs both. Which way comes first alternates. All other pairs go the way that had more of the
// last votes. Rounds come often to begin with and then seldom, but for ever, so that no verdict outlives its machine.
class PairClock {
 public:
  static constexpr std::size_t kVotes = 8;
  // Pairs from round to round, each for as many rounds as there are votes; then the last one. Primes, so that rounds
  // come to another place in every step.
  static constexpr std::array<std::size_t, 4> kPeriods{7, 13, 29, 61};

  // Whether the next pair is to be run together.
  bool next() const;
  // How long that one took.
  void note(double seconds);

 private:
  void vote(bool together);

  std::size_t num_rounds_ = 0;
  std::size_t place_ = 0;      // of the next pair: the first two are the round's
  double first_ = 0;           // seconds of the round's first pair
  std::bitset<kVotes> votes_;  // a bit a round, the last one lowest: together was faster
  bool best_ = false;
};

// Pairs of a forward and a backward that overlap: which way they run; fastpipe/runtime/stage/pairs.py has the same.
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
