// What announces a message: the look of its tensors, or that there will be none, as numbers. The format is that of
// fastpipe/runtime/process_group.py, so that ranks with either executor understand each other.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "payload.h"

namespace fastpipe {

constexpr std::size_t kHeaderWords = 512;
using Header = std::array<std::int64_t, kHeaderWords>;

// Good or stand-in, the number of tensors, then for each: dtype, requires_grad, number of dimensions, sizes, strides.
// Throws ArgumentError for tensors that do not fit into it.
Header encode_header(const std::vector<TensorSpec>& specs);
Header stand_in_header();
bool is_stand_in(const Header& header);
std::vector<TensorSpec> decode_header(const Header& header);

}  // namespace fastpipe
