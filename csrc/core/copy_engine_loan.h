// A message where it arrived. Until the loan ends, its place is not granted again.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "copy_engine.h"

namespace fastpipe {

// A place on the receiver's side.
struct CopyPlace {
  explicit CopyPlace(std::unique_ptr<CopyMark> mark) : unused(std::move(mark)) {}

  std::unique_ptr<CopyMark> unused;  // reached when nothing uses the last message any more
  bool lent = false;
};

class CopyLoan final {
 public:
  CopyLoan() = default;
  CopyLoan(std::shared_ptr<CopyEngine> engine, std::shared_ptr<CopyPlace> place, std::shared_ptr<CopyMemory> memory,
           std::byte* data)
      : engine_(std::move(engine)), place_(std::move(place)), memory_(std::move(memory)), data_(data) {
    place_->lent = true;
  }
  CopyLoan(CopyLoan&&) noexcept = default;
  CopyLoan& operator=(CopyLoan&&) noexcept = default;

  bool active() const { return place_ != nullptr; }
  std::byte* data() const { return data_; }
  // To be held by whoever points into it.
  const std::shared_ptr<CopyMemory>& memory() const { return memory_; }
  // What the calling thread's current queue has by now is the last that uses the message.
  void end() {
    engine_->current().record(*place_->unused);
    place_->lent = false;
    *this = CopyLoan();
  }

 private:
  std::shared_ptr<CopyEngine> engine_;
  std::shared_ptr<CopyPlace> place_;
  std::shared_ptr<CopyMemory> memory_;
  std::byte* data_ = nullptr;
};

}  // namespace fastpipe
