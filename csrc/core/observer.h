// Who is told how a step goes, while it goes.
#pragma once

#include <cstddef>
#include <exception>

#include "function_ref.h"

namespace fastpipe {

class Observer {
 public:
  Observer() = default;
  Observer(const Observer&) = delete;
  Observer& operator=(const Observer&) = delete;
  virtual ~Observer() = default;

  virtual void starts(std::size_t position) noexcept = 0;
  virtual void ends(std::size_t position) noexcept = 0;
  // Runs the backward of a pair, in the helper thread, as the rank's own thread would.
  virtual void beside(std::size_t, FunctionRef<void()> backward) { backward(); }
  // Called once for the compute that failed, and once for every peer that broke.
  virtual void failed(std::size_t position, const std::exception_ptr& error) noexcept = 0;
};

}  // namespace fastpipe
