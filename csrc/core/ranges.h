// Named stretches of a thread's time, for a profiler that shows them.
#pragma once

namespace fastpipe {

class Ranges {
 public:
  Ranges() = default;
  Ranges(const Ranges&) = delete;
  Ranges& operator=(const Ranges&) = delete;
  virtual ~Ranges() = default;

  // Of the calling thread; they nest.
  virtual void push(const char* name) noexcept = 0;
  virtual void pop() noexcept = 0;
};

}  // namespace fastpipe
