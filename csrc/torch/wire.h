// What the tensors of a message look like, in words, for a receiver that does not know it yet.
#pragma once

#include <c10/util/ArrayRef.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "payload.h"

namespace fastpipe {

// How many there are of a tensor.
inline std::size_t num_words(const at::Tensor& tensor) {
  return 3 + 2 * static_cast<std::size_t>(tensor.dim());
}

// dtype, requires_grad, number of dimensions; then sizes and strides. dtype: a number that both ends take for it.
void append_words(std::vector<std::int64_t>& words, const TensorSpec& spec, std::int64_t dtype);

using DtypeOf = at::ScalarType(std::int64_t);

// Throws Error where words are missing, as from another version.
class WordReader {
 public:
  explicit WordReader(c10::IntArrayRef words) : words_(words) {}

  std::int64_t next() { return next(1).front(); }
  std::vector<TensorSpec> specs(std::int64_t count, DtypeOf* dtype_of);

 private:
  c10::IntArrayRef next(std::int64_t count);

  c10::IntArrayRef words_;
};

[[noreturn]] void refuse_unreadable();

// What announces a message: the look of its tensors, or that there will be none, as numbers. The format is that of
// fastpipe/runtime/process_group.py, so that ranks with either executor understand each other.
constexpr std::size_t kHeaderWords = 512;
using Header = std::array<std::int64_t, kHeaderWords>;

// Good or stand-in, the number of tensors, then for each: dtype, requires_grad, number of dimensions, sizes, strides.
// Throws ArgumentError for tensors that do not fit into it.
Header encode_header(const std::vector<TensorSpec>& specs);
Header stand_in_header();
bool is_stand_in(const Header& header);
std::vector<TensorSpec> decode_header(const Header& header);

}  // namespace fastpipe
