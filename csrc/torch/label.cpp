#include "label.h"

#include <utility>

namespace fastpipe {

namespace {

// As torch's pipelines label theirs. Without it torch's profiler takes "2F0" for a mangled C++ name and shows "F0".
const std::string kLabelPrefix = "PP:";

}  // namespace

void Label::begin(const std::string& action, Ranges* ranges) {
  if (action.empty()) return;
  if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) {
    function_.emplace(std::move(*callbacks));
    function_->before(kLabelPrefix + action);
  }
  if (ranges == nullptr) return;
  ranges_ = ranges;
  ranges_->push(action.c_str());
}

void Label::end() noexcept {
  if (ranges_ != nullptr) ranges_->pop();
  ranges_ = nullptr;
  function_.reset();
}

}  // namespace fastpipe
