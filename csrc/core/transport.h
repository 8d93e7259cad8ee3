// How payloads get from one rank to another. One object a rank; called by the rank's own thread alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "payload.h"
#include "program.h"

namespace fastpipe {

// Which message: the SEND's stage is the producer, the POST_RECV's the consumer.
struct Transfer {
  std::size_t position;  // of the SEND or POST_RECV in the rank's program
  std::int32_t channel;
  std::int32_t stage;
  std::int32_t microbatch;
};

// Every function may throw TransportError. The peer is broken from then on: whatever concerns it returns at once and
// does nothing, so that a step can still be drained with the others.
class Transport {
 public:
  Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;
  virtual ~Transport() = default;

  // announce: what is sent is not known to the receivers yet; they learn it in this step, under `signature`.
  virtual void begin_step(std::int64_t signature, bool announce) = 0;
  // `into` receives the channel's next message; it is not touched by others until wait_receive has returned.
  virtual void post_receive(const Transfer& transfer, std::int32_t slot, Payload& into) = 0;
  // False: the message was a stand-in, the sender has failed.
  virtual bool wait_receive(std::int32_t slot) = 0;
  // `from` stays as it is until wait_send has returned. Throws ArgumentError, with nothing sent, when the payload is
  // not what was announced.
  virtual void post_send(const Transfer& transfer, std::int32_t send, const Payload& from) = 0;
  // In place of a message that will never be computed, so that the channel stays in step.
  virtual void post_stand_in(const Transfer& transfer, std::int32_t send) = 0;
  // Returns when the send was complete, in seconds of the steady clock; 0 means "just now".
  virtual double wait_send(std::int32_t send) = 0;
  // complete: nothing failed, so what was announced in this step is known from now on.
  virtual void end_step(bool complete) = 0;
  // For a device, whose streams may find a peer gone after the host has gone on: throws when what they have come to the
  // end of may be no message, in every call, and from any thread.
  virtual void check() const {}
};

// Makes the transport of one rank for one program.
class TransportSource {
 public:
  TransportSource() = default;
  TransportSource(const TransportSource&) = delete;
  TransportSource& operator=(const TransportSource&) = delete;
  virtual ~TransportSource() = default;
  virtual std::unique_ptr<Transport> connect(const RankProgram& program, double timeout_seconds) = 0;
};

}  // namespace fastpipe
