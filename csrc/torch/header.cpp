#include "header.h"

#include <algorithm>
#include <iterator>

#include "core/errors.h"

namespace fastpipe {

namespace {

constexpr std::int64_t kStandIn = 0;
constexpr std::int64_t kGood = 1;
constexpr std::int64_t kFields = 3;

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

class Reader {
 public:
  explicit Reader(const Header& words) : words_(words) {}

  c10::IntArrayRef next(std::int64_t count) {
    if (count < 0 || static_cast<std::size_t>(count) > kHeaderWords - at_) {
      throw Error("a message's header cannot be read; run the same version of fastpipe on every rank");
    }
    const c10::IntArrayRef part(words_.data() + at_, static_cast<std::size_t>(count));
    at_ += part.size();
    return part;
  }

 private:
  const Header& words_;
  std::size_t at_ = 0;
};

}  // namespace

Header encode_header(const std::vector<TensorSpec>& specs) {
  std::vector<std::int64_t> words{kGood, static_cast<std::int64_t>(specs.size())};
  for (const TensorSpec& spec : specs) {
    const auto dimensions = static_cast<std::int64_t>(spec.sizes.size());
    words.insert(words.end(), {number_of(spec.dtype), spec.requires_grad, dimensions});
    words.insert(words.end(), spec.sizes.begin(), spec.sizes.end());
    words.insert(words.end(), spec.strides.begin(), spec.strides.end());
  }
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
  Reader reader(header);
  const std::int64_t count = reader.next(2)[1];
  std::vector<TensorSpec> specs;
  for (std::int64_t tensor = 0; tensor < count; ++tensor) {
    const c10::IntArrayRef fields = reader.next(kFields);
    const c10::IntArrayRef sizes = reader.next(fields[2]);
    const c10::IntArrayRef strides = reader.next(fields[2]);
    specs.emplace_back(kDtypes.at(static_cast<std::size_t>(fields[0])), fields[1] != 0, sizes, strides);
  }
  return specs;
}

}  // namespace fastpipe
