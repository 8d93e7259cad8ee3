// What profilers call an action while it runs.
#pragma once

#include <ATen/record_function.h>

#include <optional>
#include <string>
#include <utility>

namespace fastpipe {

// A range of torch's profiler; nothing where none runs.
class Label {
 public:
  Label() = default;
  Label(const Label&) = delete;
  Label& operator=(const Label&) = delete;

  // action: "2F0"; empty for what has no label. The prefix is that of torch's pipelines: without one torch's profiler
  // takes "2F0" for a mangled C++ name and shows "F0".
  void begin(const std::string& action) {
    if (action.empty()) return;
    if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) {
      function_.emplace(std::move(*callbacks));
      function_->before("PP:" + action);
    }
  }
  void end() noexcept { function_.reset(); }

 private:
  std::optional<at::RecordFunction> function_;
};

}  // namespace fastpipe
