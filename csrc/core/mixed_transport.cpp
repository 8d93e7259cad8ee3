// Transport between ranks of several hosts: messages to ranks of this host lie in shared memory, the others go another
// way.
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "common.h"
#include "program.h"
#include "shared_memory_transport.h"
#include "transport.h"

namespace fastpipe {

namespace {

// Why it cannot hang on a program that is proved. Every channel belongs to one of the two, so the lanes are those of
// the proof. What is left to show is that a rank that blocks for the one keeps its promises to the other.
// 1. While it blocks for a near message, far ones move by themselves, as they do under a rank that computes.
// 2. While it blocks for a far message, shared memory needs it in two ways: to say which messages it holds on to, and
//    to copy what waits for room (see SharedMemoryTransport). So it says it before it blocks; and where something
//    waits for room, which is rare, the helper blocks for the far message, and the rank copies.
// 3. In a step that announces, far receives are made at their waits and near ones when they are posted. That is proved,
//    too: the proof of receives at their waits holds for any that are made earlier, as no two channels share a lane.
class MixedTransport final : public Transport {
 public:
  MixedTransport(const SharedMemoryChannels& near, const Connect& far, const RankProgram& program,
                 double timeout_seconds)
      : near_(near, program, timeout_seconds),
        far_(far(program, timeout_seconds)),
        receives_(program.num_slots()),
        sends_(program.num_sends()) {
    for (std::size_t channel = 0; channel < program.channels().size(); ++channel) {
      is_near_.push_back(near.carries(channel));
    }
  }

  void begin_step(std::int64_t signature, bool announce) override {
    near_.begin_step(signature, announce);
    far_->begin_step(signature, announce);
  }

  void post_receive(const Transfer& transfer, std::int32_t slot, Payload& into) override {
    if (receives_[slot] == &near_) near_.report_held_cell(slot);
    receives_[slot] = &side_of(transfer.channel);
    receives_[slot]->post_receive(transfer, slot, into);
  }

  bool wait_receive(std::int32_t slot) override {
    if (receives_[slot] == &near_) return near_.wait_receive(slot);
    bool arrived = false;
    block([&] { arrived = far_->wait_receive(slot); });
    return arrived;
  }

  void post_send(const Transfer& transfer, std::int32_t send, const Payload& from) override {
    sends_[send] = &side_of(transfer.channel);
    sends_[send]->post_send(transfer, send, from);
  }

  void post_stand_in(const Transfer& transfer, std::int32_t send) override {
    sends_[send] = &side_of(transfer.channel);
    sends_[send]->post_stand_in(transfer, send);
  }

  double wait_send(std::int32_t send) override {
    if (sends_[send] == &near_) return near_.wait_send(send);
    double completed = 0;
    block([&] { completed = far_->wait_send(send); });
    return completed;
  }

  void end_step(bool complete) override {
    std::exception_ptr error;
    for (Transport* side : {static_cast<Transport*>(&near_), far_.get()}) {
      try {
        side->end_step(complete);
      } catch (...) {
        error = std::current_exception();
      }
    }
    if (error) std::rethrow_exception(error);
  }

 private:
  Transport& side_of(std::int32_t channel) {
    if (is_near_[channel]) return near_;
    return *far_;
  }

  // Blocks in `far`, which waits for a far message, and serves shared memory meanwhile.
  void block(FunctionRef<void()> far) {
    near_.report_held_cells();
    if (near_.advance()) return far();
    block_beside(far);
  }

  void block_beside(FunctionRef<void()> far) {
    if (!helper_) helper_ = std::make_unique<Helper>();
    std::atomic<bool> over{false};
    const auto end = [&] {
      over.store(true);
      near_.wake_own_rank();
    };
    const auto job = [&] {
      try {
        far();
      } catch (...) {
        end();
        throw;
      }
      end();
    };
    helper_->start(job);
    std::exception_ptr error;
    for (bool served = false; !served;) {
      try {
        near_.serve(over);
        served = true;
      } catch (...) {
        error = std::current_exception();  // of one message; the others still want to be copied
      }
    }
    const std::exception_ptr far_error = helper_->finish();
    if (far_error) std::rethrow_exception(far_error);
    if (error) std::rethrow_exception(error);
  }

  std::vector<bool> is_near_;  // by channel
  SharedMemoryTransport near_;
  std::unique_ptr<Transport> far_;
  std::vector<Transport*> receives_;  // by slot: the side that was asked last
  std::vector<Transport*> sends_;
  std::unique_ptr<Helper> helper_;  // made when it is needed
};

}  // namespace

Connect over_both(std::shared_ptr<const SharedMemoryChannels> near, Connect far) {
  return [near = std::move(near), far = std::move(far)](const RankProgram& program, double timeout_seconds) {
    near->check(program);
    return std::make_unique<MixedTransport>(*near, far, program, timeout_seconds);
  };
}

}  // namespace fastpipe
