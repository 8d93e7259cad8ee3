// What the core throws. Python sees ArgumentError as ValueError and the others as RuntimeError.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace fastpipe {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The caller's mistake: a program that names what is not there, a tensor that is not what was announced.
class ArgumentError final : public Error {
 public:
  using Error::Error;
};

// A peer that is dead, silent or out of step. What is under way with it can no longer be drained.
class TransportError final : public Error {
 public:
  // peer: less than 0 where it is not known which one.
  TransportError(std::int32_t peer, const std::string& message) : Error(message), peer_(peer) {}
  std::int32_t peer() const { return peer_; }

 private:
  std::int32_t peer_;
};

}  // namespace fastpipe
