// How a payload lies in a place: the torch side knows tensors, a stub numbers.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "copy_engine_loan.h"
#include "payload.h"

namespace fastpipe {

// A piece of a payload. In a place they lie one after the other, each from a whole line on.
struct CopyPart {
  const std::byte* data;
  std::size_t bytes;
};

class CopyCodec {
 public:
  CopyCodec() = default;
  CopyCodec(const CopyCodec&) = delete;
  CopyCodec& operator=(const CopyCodec&) = delete;
  virtual ~CopyCodec() = default;

  // Of a place for such a message.
  virtual std::size_t size(const Spec& spec) const = 0;
  virtual void list(const Payload& payload, std::vector<CopyPart>& parts) const = 0;
  // Replaces the pieces by copies, made in the current queue, in memory that what is returned keeps.
  virtual std::shared_ptr<const void> duplicate(std::vector<CopyPart>& parts) const = 0;
  // Makes the message, which is there for the current queue, the contents of `into`. It ends the loan when it is
  // cleared.
  virtual void adopt(Payload& into, const Spec& spec, CopyLoan loan) const = 0;
};

}  // namespace fastpipe
