// A callable that is lent for the length of a call: no copy, no memory.
#pragma once

#include <memory>
#include <type_traits>
#include <utility>

namespace fastpipe {

template <typename Signature>
class FunctionRef;

template <typename Result, typename... Arguments>
class FunctionRef<Result(Arguments...)> final {
 public:
  template <typename Callable, typename = std::enable_if_t<!std::is_same_v<std::decay_t<Callable>, FunctionRef>>>
  FunctionRef(const Callable& callable)  // NOLINT: meant to be implicit
      : callable_(std::addressof(callable)), call_(&call<Callable>) {}

  Result operator()(Arguments... arguments) const { return call_(callable_, std::forward<Arguments>(arguments)...); }

 private:
  template <typename Callable>
  static Result call(const void* callable, Arguments... arguments) {
    return (*static_cast<const Callable*>(callable))(std::forward<Arguments>(arguments)...);
  }

  const void* callable_;
  Result (*call_)(const void*, Arguments...);
};

}  // namespace fastpipe
