// Which way the pairs of two stages go.
#pragma once

#include <array>
#include <cstddef>

namespace fastpipe {

// The first pairs go either way by turns; the next ones go the way whose median was less; after a while it is
// measured again, later each time, since the first pairs of all may be slow for reasons of their own.
class PairClock {
 public:
  static constexpr std::size_t kSamples = 8;
  static constexpr std::size_t kFirstKept = 64;
  static constexpr std::size_t kKept = 4096;  // in the long run

  // Whether the next pair is to be run together.
  bool next() const { return left_ > 0 ? best_ : together_.count < in_order_.count; }
  // How long it took.
  void note(bool together, double seconds);

 private:
  struct Samples {
    double median();

    std::array<double, kSamples> seconds{};
    std::size_t count = 0;
  };

  Samples in_order_;
  Samples together_;
  bool best_ = false;
  std::size_t left_ = 0;
  std::size_t kept_ = kFirstKept;
};

}  // namespace fastpipe
