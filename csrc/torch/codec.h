// Tensors as messages: what they look like, in words, and how they lie in memory that two processes share.
#pragma once

#include <c10/util/ArrayRef.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/shared_memory_transport.h"
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
// fastpipe/runtime/transport/process_group.py, so that ranks with either executor understand each other.
constexpr std::size_t kHeaderWords = 512;
using Header = std::array<std::int64_t, kHeaderWords>;

// What a header can name, each by its place in this list.
c10::ArrayRef<at::ScalarType> header_dtypes();

// Good or stand-in, the number of tensors, then for each: dtype, requires_grad, number of dimensions, sizes, strides.
// Throws ArgumentError for tensors that do not fit into it.
Header encode_header(const std::vector<TensorSpec>& specs);
Header stand_in_header();
bool is_stand_in(const Header& header);
std::vector<TensorSpec> decode_header(const Header& header);

// Tensors in memory that two processes share: one after the other, strides kept; in cells of the host's memory each
// aligned to 64 bytes, in places of a device's to 512.
class TensorCodec final : public Codec {
 public:
  // device: where the tensors are. Between the host and another device they are copied, and the host waits.
  explicit TensorCodec(at::Device device = at::Device(at::kCPU)) : device_(device) {}

  std::size_t size(const Payload& payload, bool announced) const override;
  void write(const Payload& payload, const CellBytes& to) const override;
  std::unique_ptr<Spec> read_spec(const CellBytes& from) const override;
  // On a CPU the tensors lie in the cell itself: it is theirs, to change as well, until the last of them and of what
  // shares their storage is gone.
  void adopt(Payload& into, const Spec& spec, const CellBytes& from, SharedMemoryLease lease) const override;

  std::size_t size(const Spec& spec) const override;
  void list(const Payload& payload, std::vector<CopyPart>& parts) const override;
  std::shared_ptr<const void> duplicate(std::vector<CopyPart>& parts) const override;
  // The tensors lie in the place itself.
  void adopt(Payload& into, const Spec& spec, CopyLoan loan) const override;

 private:
  void write_one(const at::Tensor& tensor, std::byte* to) const;

  at::Device device_;
};

}  // namespace fastpipe
