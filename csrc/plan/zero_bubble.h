// What the searches behind zb_auto and zbv share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace fastpipe::plan {

// The orders of all ranks, one behind the other; false if one is not complete.
template <typename Ranks>
bool write_orders(const Ranks& ranks, std::size_t length, std::int32_t* kinds) {
  for (const auto& rank : ranks) {
    if (rank.order.size() != length) return false;
    kinds = std::copy(rank.order.begin(), rank.order.end(), kinds);
  }
  return true;
}

}  // namespace fastpipe::plan
