#include "spec_words.h"

#include "core/errors.h"

namespace fastpipe {

void append_words(std::vector<std::int64_t>& words, const TensorSpec& spec, std::int64_t dtype) {
  words.insert(words.end(), {dtype, spec.requires_grad, static_cast<std::int64_t>(spec.sizes.size())});
  words.insert(words.end(), spec.sizes.begin(), spec.sizes.end());
  words.insert(words.end(), spec.strides.begin(), spec.strides.end());
}

std::vector<TensorSpec> WordReader::specs(std::int64_t count, DtypeOf* dtype_of) {
  std::vector<TensorSpec> found;
  for (std::int64_t tensor = 0; tensor < count; ++tensor) {
    const at::ScalarType dtype = dtype_of(next());
    const bool requires_grad = next() != 0;
    const std::int64_t dimensions = next();
    const c10::IntArrayRef sizes = next(dimensions);
    found.emplace_back(dtype, requires_grad, sizes, next(dimensions));
  }
  return found;
}

c10::IntArrayRef WordReader::next(std::int64_t count) {
  if (count < 0 || static_cast<std::size_t>(count) > words_.size()) refuse_unreadable();
  const c10::IntArrayRef found = words_.slice(0, static_cast<std::size_t>(count));
  words_ = words_.slice(found.size());
  return found;
}

void refuse_unreadable() {
  throw Error("a message from another rank cannot be read; run the same version of fastpipe on every rank");
}

}  // namespace fastpipe
