// How a payload lies in a cell: the torch side knows tensors, a stub numbers.
#pragma once

#include <cstddef>
#include <memory>

#include "payload.h"
#include "shared_memory_lease.h"

namespace fastpipe {

// A message in a cell, aligned to kSharedLine.
struct CellBytes {
  std::byte* data;
  std::size_t size;
  bool announced;  // it begins with what it looks like
};

class SharedMemoryCodec {
 public:
  SharedMemoryCodec() = default;
  SharedMemoryCodec(const SharedMemoryCodec&) = delete;
  SharedMemoryCodec& operator=(const SharedMemoryCodec&) = delete;
  virtual ~SharedMemoryCodec() = default;

  // How many bytes write() fills.
  virtual std::size_t size(const Payload& payload, bool announced) const = 0;
  virtual void write(const Payload& payload, const CellBytes& to) const = 0;
  // What an announced message looks like.
  virtual std::unique_ptr<Spec> read_spec(const CellBytes& from) const = 0;
  // Makes the message the contents of `into`, which looks like `spec`. What goes on using the cell keeps the lease.
  // Throws Error when the size is not the spec's.
  virtual void adopt(Payload& into, const Spec& spec, const CellBytes& from, SharedMemoryLease lease) const = 0;
};

}  // namespace fastpipe
