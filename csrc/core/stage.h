// What the loop asks of others: stages that compute, and observers that are told.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>

#include "common.h"
#include "program.h"
#include "transport.h"

namespace fastpipe {

// One stage's compute, microbatch by microbatch. It keeps what lies between a forward and its backward.
class Stage {
 public:
  Stage() = default;
  Stage(const Stage&) = delete;
  Stage& operator=(const Stage&) = delete;
  virtual ~Stage() = default;

  virtual bool is_first() const = 0;
  virtual bool is_last() const = 0;

  // `input` is null on the first stage.
  virtual void forward(std::int32_t microbatch, const Payload* input) = 0;
  // `gradient` is null on the last stage, whose root is the loss.
  virtual void backward(std::int32_t microbatch, const Payload* gradient) = 0;
  virtual void backward_input(std::int32_t microbatch, const Payload* gradient) = 0;
  virtual void backward_weight(std::int32_t microbatch) = 0;
  // UNSHARD, RESHARD or REDUCE_GRAD: the stage and its replicas in other pipelines meet. In a failed step, too, since
  // they wait for one another; `failed` says so. Nothing for a stage without replicas.
  virtual void meet(Op, bool /*failed*/) {}
  // Whether this stage's forward may run while the other's backward does.
  virtual bool may_run_beside(const Stage&) const { return true; }
  // Runs a forward and another stage's full backward in a way of their own, or does nothing and returns false.
  virtual bool fuse(std::int32_t, const Payload*, Stage&, std::int32_t, const Payload*) { return false; }
  // Moves what the microbatch's last forward (activation) or backward (gradient) produced into `into`.
  virtual void take(ChannelKind kind, std::int32_t microbatch, Payload& into) = 0;
  // Around what the loop and the transport do for this stage between its own methods: a device with queues queues it
  // behind the stage's work. By the rank's own thread, never one in another.
  virtual void begin_turn() {}
  virtual void end_turn() noexcept {}
  // Lets go of all that is kept, of every microbatch.
  virtual void release() noexcept = 0;
};

// Who is told how a step goes, while it goes.
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
