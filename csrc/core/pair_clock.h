// Which way the pairs of two stages go.
#pragma once

#include <array>
#include <bitset>
#include <cstddef>

namespace fastpipe {

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

}  // namespace fastpipe
