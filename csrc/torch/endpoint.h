// One rank's end of a transport that is C++ alone, for the Python executor.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/program.h"
#include "core/transport.h"
#include "payload.h"

namespace fastpipe {

class Endpoint final {
 public:
  Endpoint(TransportSource& source, const RankProgram& program, double timeout_seconds);

  // Ends the step before, too.
  void begin(std::int64_t signature, bool announce);
  // position: of the POST_RECV or SEND in the rank's program.
  void post_receive(std::size_t position);
  // Nothing: the sender has failed.
  std::optional<std::vector<at::Tensor>> wait_receive(std::int32_t slot);
  // Without tensors: a stand-in.
  void send(std::size_t position, const std::optional<std::vector<at::Tensor>>& tensors);
  void wait_send(std::int32_t number);
  void end(bool complete);
  // See Transport.
  void check() const { transport_->check(); }

 private:
  Transfer transfer(std::size_t position) const;

  RankProgram program_;
  std::vector<std::unique_ptr<TensorPayload>> slots_;
  std::vector<std::unique_ptr<TensorPayload>> sends_;
  std::unique_ptr<Transport> transport_;
  bool in_step_ = false;
};

}  // namespace fastpipe
