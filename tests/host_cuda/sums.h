// What a collective makes of the numbers of all ranks, in the order of the ranks.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "numbers.h"

namespace host_cuda {

inline std::size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    default:
      return 4;
  }
}

template <typename Stored, typename Number>
void add_up(const std::vector<std::vector<std::byte>>& all, ncclRedOp_t op, std::vector<std::byte>* into) {
  const std::size_t count = into->size() / sizeof(Stored);
  for (std::size_t i = 0; i < count; ++i) {
    Number total{};
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      Stored stored;
      std::memcpy(&stored, all[rank].data() + i * sizeof(Stored), sizeof(Stored));
      const Number value = stored;
      if (rank == 0) {
        total = value;
      } else if (op == ncclSum || op == ncclAvg) {
        total = static_cast<Number>(total + value);
      } else if (op == ncclMax) {
        total = value > total ? value : total;
      } else if (op == ncclMin) {
        total = value < total ? value : total;
      } else {
        total = static_cast<Number>(total * value);
      }
    }
    if (op == ncclAvg) total = static_cast<Number>(total / static_cast<Number>(all.size()));
    Stored stored;
    stored = total;
    std::memcpy(into->data() + i * sizeof(Stored), &stored, sizeof(Stored));
  }
}

inline std::vector<std::byte> sum(const std::vector<std::vector<std::byte>>& all, ncclDataType_t type, ncclRedOp_t op) {
  std::vector<std::byte> into(all.front().size());
  switch (type) {
    case ncclFloat32:
      add_up<float, float>(all, op, &into);
      break;
    case ncclFloat64:
      add_up<double, double>(all, op, &into);
      break;
    case ncclBfloat16:
      add_up<Bfloat16, float>(all, op, &into);
      break;
    case ncclInt32:
      add_up<std::int32_t, std::int32_t>(all, op, &into);
      break;
    case ncclInt64:
      add_up<std::int64_t, std::int64_t>(all, op, &into);
      break;
    case ncclUint8:
      add_up<std::uint8_t, std::uint8_t>(all, op, &into);
      break;
    default:
      std::fprintf(stderr, "NCCL on the host adds up no numbers of type %d\n", type);
      std::abort();
  }
  return into;
}

}  // namespace host_cuda
