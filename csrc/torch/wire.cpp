#include "wire.h"

#include <algorithm>
#include <iterator>

#include "core/common.h"

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

namespace {

constexpr std::int64_t kStandIn = 0;
constexpr std::int64_t kGood = 1;

constexpr std::array<at::ScalarType, 20> kDtypes = {
    at::kFloat,
    at::kDouble,
    at::kHalf,
    at::kBFloat16,
    at::kLong,
    at::kInt,
    at::kShort,
    at::kChar,
    at::kByte,
    at::kBool,
    at::kComplexFloat,
    at::kComplexDouble,
    at::kUInt16,
    at::kUInt32,
    at::kUInt64,
    at::kComplexHalf,
    at::kFloat8_e4m3fn,
    at::kFloat8_e5m2,
    at::kFloat8_e4m3fnuz,
    at::kFloat8_e5m2fnuz,
};

std::int64_t number_of(at::ScalarType dtype) {
  const auto* found = std::find(kDtypes.begin(), kDtypes.end(), dtype);
  if (found != kDtypes.end()) return std::distance(kDtypes.begin(), found);
  throw ArgumentError(std::string("a stage hands on a tensor of ") + c10::toString(dtype) +
                      ", which cannot be sent; convert it");
}

at::ScalarType dtype_of(std::int64_t number) {
  if (number < 0 || static_cast<std::size_t>(number) >= kDtypes.size()) refuse_unreadable();
  return kDtypes[static_cast<std::size_t>(number)];
}

}  // namespace

Header encode_header(const std::vector<TensorSpec>& specs) {
  std::vector<std::int64_t> words{kGood, static_cast<std::int64_t>(specs.size())};
  for (const TensorSpec& spec : specs) append_words(words, spec, number_of(spec.dtype));
  if (words.size() > kHeaderWords) {
    throw ArgumentError("a stage hands on " + std::to_string(specs.size()) +
                        " tensors, more than a header describes; join some of them");
  }
  Header header{};
  std::copy(words.begin(), words.end(), header.begin());
  return header;
}

Header stand_in_header() {
  Header header{};
  header[0] = kStandIn;
  return header;
}

bool is_stand_in(const Header& header) {
  return header[0] == kStandIn;
}

std::vector<TensorSpec> decode_header(const Header& header) {
  WordReader reader(header);
  reader.next();
  const std::int64_t count = reader.next();
  return reader.specs(count, dtype_of);
}

}  // namespace fastpipe
