// What moves between stages and how: payloads, what they look like, and transports.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "program.h"

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

// What moves between stages, as the core sees it: opaque. The torch side makes it a list of tensors, a stub a number.
// It is a receive slot's contents, or what a send reads. The executor makes each once and fills it again and again.
class Payload {
 public:
  Payload() = default;
  Payload(const Payload&) = delete;
  Payload& operator=(const Payload&) = delete;
  virtual ~Payload() = default;

  // Frees the contents; memory to receive into may stay, ...
  virtual void clear() noexcept = 0;
  // ... until it is dropped, between steps.
  virtual void drop_memory() noexcept {}
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

// Which message: the SEND's stage is the producer, the POST_RECV's the consumer.
struct Transfer {
  std::size_t position;  // of the SEND or POST_RECV in the rank's program
  std::int32_t channel;
  std::int32_t stage;
  std::int32_t microbatch;

  // The consumer's stage, of a SEND.
  std::int32_t consumer(ChannelKind kind) const { return stage + (kind == ChannelKind::kActivation ? 1 : -1); }
};

// How payloads get from one rank to another. One object a rank; called by the rank's own thread alone.
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
using Connect = std::function<std::unique_ptr<Transport>(const RankProgram& program, double timeout_seconds)>;

// Between ranks that are threads of one process, for all ranks of a program: strict FIFO lanes, no buffer. lanes: that
// of each channel, by its index. delay_seconds: how long a send waits before it can be executed.
Connect over_loopback(std::vector<Channel> channels, std::vector<std::int32_t> lanes, double delay_seconds);

// The peers of one rank that are broken: nothing is exchanged with them any more.
class BrokenPeers final {
 public:
  explicit BrokenPeers(std::int32_t rank) : rank_(rank) {}

  bool any() const { return all_ || !peers_.empty(); }
  bool has(std::int32_t peer) const { return all_ || std::find(peers_.begin(), peers_.end(), peer) != peers_.end(); }
  // The first one, kNone if it is not known, and why.
  std::int32_t first() const { return peers_.empty() ? kNone : peers_.front(); }
  const std::string& why() const { return why_; }
  void add(std::int32_t peer, const std::string& why);
  void add_all(const std::string& why);
  // At the beginning of a step. Throws TransportError if there is any.
  void require_none() const;
  // Throws the Error for a step that ended with something on its way, though no peer is broken.
  [[noreturn]] void refuse_undrained() const;
  // Throws the TransportError for a transfer with a broken peer, at a place in the program.
  [[noreturn]] static void refuse(std::int32_t peer, const std::string& place, const std::string& why);

 private:
  std::int32_t rank_;
  std::vector<std::int32_t> peers_;
  bool all_ = false;
  std::string why_;
};

// What each message of a step looks like, by the signature of the step's input: learnt once, known from then on.
class SpecBook {
 public:
  explicit SpecBook(std::size_t num_instructions) : size_(num_instructions) {}

  // Throws ArgumentError for a signature that is neither known nor announced.
  void open(std::int64_t signature, bool announce);
  bool announcing() const { return announcing_; }
  void learn(std::size_t position, std::unique_ptr<Spec> spec);
  const Spec& at(std::size_t position) const;
  // What is sent at a position of the program: learnt in a step that announces, else compared with what was announced.
  // Throws ArgumentError when it differs.
  void learn_or_check(std::size_t position, const Payload& payload, const RankProgram& program);
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
