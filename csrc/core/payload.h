// What moves between stages, as the core sees it: opaque. The torch side makes it a list of tensors, a stub a number.
#pragma once

#include <memory>
#include <string>

namespace fastpipe {

// What a payload looks like, without its data: what both ends of a channel agree on.
class Spec {
 public:
  Spec() = default;
  Spec(const Spec&) = delete;
  Spec& operator=(const Spec&) = delete;
  virtual ~Spec() = default;
  virtual std::string text() const = 0;
};

// A receive slot's contents, or what a send reads. The executor makes each once and fills it again and again.
class Payload {
 public:
  Payload() = default;
  Payload(const Payload&) = delete;
  Payload& operator=(const Payload&) = delete;
  virtual ~Payload() = default;

  // Lets go of the contents; memory to receive into may stay.
  virtual void clear() noexcept = 0;
  virtual bool empty() const = 0;
  // Makes the contents fit for a transfer (dense memory). Throws ArgumentError for what cannot be transferred.
  virtual void pack() = 0;
  // Replaces the contents by a copy, never in memory that somebody else can still see.
  virtual void copy_from(const Payload& source) = 0;
  virtual std::unique_ptr<Spec> spec() const = 0;
  virtual bool matches(const Spec& spec) const = 0;
  // The step is over: what streams get from now on comes after all that worked with the memory in it.
  virtual void end_step() noexcept {}
};

}  // namespace fastpipe
