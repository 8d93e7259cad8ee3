// What each message of a step looks like, by the signature of the step's input: learnt once, known from then on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "payload.h"

namespace fastpipe {

class SpecBook {
 public:
  explicit SpecBook(std::size_t num_instructions) : size_(num_instructions) {}

  // Throws ArgumentError for a signature that is neither known nor announced.
  void open(std::int64_t signature, bool announce);
  bool announcing() const { return announcing_; }
  void learn(std::size_t position, std::unique_ptr<Spec> spec);
  const Spec& at(std::size_t position) const;
  bool fits(std::size_t position, const Payload& payload) const { return payload.matches(at(position)); }
  // Throws the ArgumentError for a payload that does not fit; `place` is for the message.
  [[noreturn]] void refuse(std::size_t position, const Payload& payload, const std::string& place) const;
  // What was being learnt replaces what was known under the signature, if it is complete; else it is dropped.
  void close(bool complete);

 private:
  using Page = std::vector<std::unique_ptr<Spec>>;

  std::size_t size_;
  std::map<std::int64_t, Page> pages_;
  Page draft_;
  Page* page_ = nullptr;  // of this step: the draft or one of `pages_`, whose nodes stay where they are
  std::int64_t signature_ = 0;
  bool announcing_ = false;
};

}  // namespace fastpipe
