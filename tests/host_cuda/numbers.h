// Numbers that C++17 does not have.
#pragma once

#include <cstdint>
#include <cstring>

namespace host_cuda {

// As a float of the upper half of its bits.
struct Bfloat16 {
  std::uint16_t bits;
  operator float() const {
    const std::uint32_t whole = static_cast<std::uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &whole, sizeof(value));
    return value;
  }
  Bfloat16& operator=(float value) {
    std::uint32_t whole;
    std::memcpy(&whole, &value, sizeof(whole));
    bits = static_cast<std::uint16_t>((whole + 0x7fff + ((whole >> 16) & 1)) >> 16);
    return *this;
  }
};

}  // namespace host_cuda
