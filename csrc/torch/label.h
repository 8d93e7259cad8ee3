// What profilers call an action while it runs.
#pragma once

#include <ATen/record_function.h>

#include <optional>
#include <string>

#include "core/ranges.h"

namespace fastpipe {

// For torch's profiler where it runs, and as a range where ranges are wanted.
class Label {
 public:
  Label() = default;
  Label(const Label&) = delete;
  Label& operator=(const Label&) = delete;
  ~Label() { end(); }

  // action: "2F0"; empty for what has no label. ranges: null where none are wanted.
  void begin(const std::string& action, Ranges* ranges);
  void end() noexcept;

 private:
  std::optional<at::RecordFunction> function_;
  Ranges* ranges_ = nullptr;
};

}  // namespace fastpipe
