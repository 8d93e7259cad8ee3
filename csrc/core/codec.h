// How a payload lies in memory that two processes share: the torch side knows tensors, a stub numbers.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "copy_engine.h"
#include "payload.h"
#include "shared_memory_lease.h"

namespace fastpipe {

// A message in a cell, aligned to kSharedLine.
struct CellBytes {
  std::byte* data;
  std::size_t size;
  bool announced;  // it begins with what it looks like
};

// A piece of a payload. In a place they lie one after the other, each from a whole block on.
struct CopyPart {
  const std::byte* data;
  std::size_t bytes;
};

// Tensors begin where an allocator of a device would put them: kernels are chosen by it, and with them the last bits.
constexpr std::size_t whole_blocks(std::size_t bytes) {
  constexpr std::size_t kBlock = 512;
  return (bytes + kBlock - 1) / kBlock * kBlock;
}

class Codec {
 public:
  Codec() = default;
  Codec(const Codec&) = delete;
  Codec& operator=(const Codec&) = delete;
  virtual ~Codec() = default;

  // In a cell of shared memory: how many bytes write() fills.
  virtual std::size_t size(const Payload& payload, bool announced) const = 0;
  virtual void write(const Payload& payload, const CellBytes& to) const = 0;
  // What an announced message looks like.
  virtual std::unique_ptr<Spec> read_spec(const CellBytes& from) const = 0;
  // Makes the message the contents of `into`, which looks like `spec`. What goes on using the cell keeps the lease.
  // Throws Error when the size is not the spec's.
  virtual void adopt(Payload& into, const Spec& spec, const CellBytes& from, SharedMemoryLease lease) const = 0;

  // In a place of a device's memory, to which an engine copies: the size of a place for such a message.
  virtual std::size_t size(const Spec& spec) const = 0;
  virtual void list(const Payload& payload, std::vector<CopyPart>& parts) const = 0;
  // Replaces the pieces by copies, made in the current queue, in memory that what is returned keeps.
  virtual std::shared_ptr<const void> duplicate(std::vector<CopyPart>& parts) const = 0;
  // Makes the message, which is there for the current queue, the contents of `into`. It ends the loan when it is
  // cleared.
  virtual void adopt(Payload& into, const Spec& spec, CopyLoan loan) const = 0;
};

}  // namespace fastpipe
