// Process groups of the fake device, over those of the host: its messages and collectives go through streams, as NCCL's
// do.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "fake_state.h"

namespace fake_device {

// A message under way: to wait for it is to make the current stream wait, as NCCL does it.
class Message final : public c10d::Work {
 public:
  Message(c10::intrusive_ptr<c10d::Work> inner, std::vector<at::Tensor> tensors, const Event& done)
      : inner_(std::move(inner)), tensors_(std::move(tensors)), done_(done) {}
  // Recorded: not under way now, but whenever the tape has begun it.
  Message(std::shared_ptr<c10::intrusive_ptr<c10d::Work>> again, std::vector<at::Tensor> tensors, const Event& done)
      : again_(std::move(again)), tensors_(std::move(tensors)), done_(done) {}

  bool isCompleted() override { return inner_ && inner_->isCompleted(); }
  bool wait(std::chrono::milliseconds timeout) override {
    if (timeout != kNoTimeout) account().host_waits(current_stream, "wait with a time limit");
    if (waited_) {  // by another part of the same operation
    } else if (inner_) {
      inner_->wait();  // here for the bytes to be there, which the account knows nothing of
    } else {
      tape.load()->note([again = again_] { (*again)->wait(); });
    }
    waited_ = true;
    account().blocked(current_stream, done_);
    tensors_.clear();
    return true;
  }

 private:
  bool waited_ = false;
  c10::intrusive_ptr<c10d::Work> inner_;
  std::shared_ptr<c10::intrusive_ptr<c10d::Work>> again_;
  std::vector<at::Tensor> tensors_;
  Event done_;
};

// Several messages that are done together.
class Operation final : public c10d::Work {
 public:
  explicit Operation(std::vector<c10::intrusive_ptr<c10d::Work>> messages) : messages_(std::move(messages)) {}

  bool wait(std::chrono::milliseconds timeout) override {
    for (const auto& message : messages_) message->wait(timeout);
    return true;
  }

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> messages_;
};

// How many messages each operation had.
inline std::vector<std::size_t> operations;

// Done as far as the host is concerned, as NCCL's collectives are once they are queued. Who waits for the future, or
// for this, waits on its own stream.
class Collective final : public c10d::Work {
 public:
  Collective(std::vector<at::Tensor> tensors, std::size_t stream)
      : future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                         std::vector<c10::Device>{kDevice})),
        done_(account().recorded(stream)) {
    const c10::StreamGuard guard(to_stream(stream));
    future_->markCompleted(tensors);
  }

  bool isCompleted() override { return true; }
  bool wait(std::chrono::milliseconds) override {
    account().blocked(current_stream, done_);
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  Event done_;
};

// As NCCL: a stream for every peer, where an operation comes after all that is on the stream it is posted from; and one
// for collectives.
class Messages final : public c10d::Backend {
 public:
  static constexpr int kEverybody = -1;

  Messages(c10::intrusive_ptr<c10d::Backend> inner, int rank, int size)
      : Backend(rank, size), inner_(std::move(inner)) {}

  const std::string getBackendName() const override { return "messages"; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { held_.emplace(); }
  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    std::vector<c10::intrusive_ptr<c10d::Work>> begun;
    const auto held = std::exchange(held_, std::nullopt);
    for (const auto& begin : *held) begun.push_back(begin());
    operations.push_back(begun.size());
    return c10::make_intrusive<Operation>(std::move(begun));
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    queue(tensors.front(), kEverybody, true);
    std::vector<at::Tensor> host{host_view(tensors.front())};
    inner_->allreduce(host, options)->wait();
    return c10::make_intrusive<Collective>(tensors, streams_.at(kEverybody));
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    queue(tensors.front(), kEverybody, true);
    std::vector<at::Tensor> host{host_view(tensors.front())};
    inner_->broadcast(host, options)->wait();
    return c10::make_intrusive<Collective>(tensors, streams_.at(kEverybody));
  }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& options) override {
    queue(inputs.front(), kEverybody, false);
    std::vector<std::vector<at::Tensor>> all(1);
    for (const at::Tensor& output : outputs.front()) {
      queue(output, kEverybody, true);
      all.front().push_back(host_view(output));
    }
    std::vector<at::Tensor> host{host_view(inputs.front())};
    inner_->allgather(all, host, options)->wait();
    return c10::make_intrusive<Collective>(outputs.front(), streams_.at(kEverybody));
  }
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int peer, int tag) override {
    return move(tensors, peer, false,
                [inner = inner_, peer, tag](std::vector<at::Tensor>& host) { return inner->send(host, peer, tag); });
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int peer, int tag) override {
    return move(tensors, peer, true,
                [inner = inner_, peer, tag](std::vector<at::Tensor>& host) { return inner->recv(host, peer, tag); });
  }

 private:
  using Move = std::function<c10::intrusive_ptr<c10d::Work>(std::vector<at::Tensor>&)>;

  c10::intrusive_ptr<c10d::Work> move(const std::vector<at::Tensor>& tensors, int peer, bool receives, const Move& go) {
    if (!held_) return begin(tensors, peer, receives, go);
    held_->push_back([this, tensors, peer, receives, go] { return begin(tensors, peer, receives, go); });
    return nullptr;
  }

  c10::intrusive_ptr<c10d::Work> begin(const std::vector<at::Tensor>& tensors, int peer, bool receives,
                                       const Move& go) {
    if (receives) account().received(tensors.front().const_data_ptr());
    const Event done = queue(tensors.front(), peer, receives);
    const auto start = [go, tensor = tensors.front()] {
      std::vector<at::Tensor> host{host_view(tensor)};
      return go(host);
    };
    if (tape == nullptr) return c10::make_intrusive<Message>(start(), tensors, done);
    auto again = std::make_shared<c10::intrusive_ptr<c10d::Work>>();
    tape.load()->note([again, start] { *again = start(); });
    return c10::make_intrusive<Message>(std::move(again), tensors, done);
  }

  Event queue(const at::Tensor& tensor, int peer, bool writes) {
    const auto [found, is_new] = streams_.try_emplace(peer, 0);
    if (is_new) found->second = account().new_stream();
    const std::size_t stream = found->second;
    account().blocked(stream, account().recorded(current_stream));
    account().touched(tensor.const_data_ptr(), writes, stream,
                      peer == kEverybody ? "a collective"
                      : writes           ? "a receive"
                                         : "a send");
    return account().recorded(stream);
  }

  c10::intrusive_ptr<c10d::Backend> inner_;
  std::map<int, std::size_t> streams_;
  // What is to be one operation, while it is being said.
  std::optional<std::vector<std::function<c10::intrusive_ptr<c10d::Work>()>>> held_;
};

// Gives a group a way for the device's tensors, over that for the host's.
inline void add_device(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  const auto inner = group->getBackend(c10::kCPU);
  const auto messages = c10::make_intrusive<Messages>(inner, group->getRank(), group->getSize());
  group->setBackend(kFake, c10d::ProcessGroup::BackendType::CUSTOM, messages);
}

}  // namespace fake_device
