// A lane of the loopback transport: what is posted on it is executed in order on each of its two ends, and a message
// is copied when its send and its receive are both first in line. There is no buffer: who overwrites or frees what is
// being sent too early corrupts it, here as on a network.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <string>

#include "clock.h"
#include "payload.h"
#include "program.h"

namespace fastpipe {

// One posted send or receive. It belongs to its rank; while it is posted it also hangs in its lane's queue.
struct LoopbackOperation {
  bool posted = false;  // the owner's: posted and not waited for yet
  bool done = false;    // the lane's, under its mutex
  bool is_send = false;
  bool stand_in = false;  // of a receive: what arrived was one
  std::int32_t channel = kNone;
  std::int32_t stage = kNone;  // the consumer's, on both ends
  std::int32_t microbatch = kNone;
  const Payload* source = nullptr;  // null: a stand-in
  Payload* target = nullptr;
  Clock::time_point eligible{};
  double completed = 0;
  std::exception_ptr error;  // of a receive: the copy failed
  LoopbackOperation* next = nullptr;
};

class LoopbackLane {
 public:
  using Operation = LoopbackOperation;

  // `end`: 0 is the lower rank, 1 the higher. False when the lane is broken.
  bool post(int end, Operation& operation);
  // Until the operation is done; false when the lane is broken or the time is over, which breaks it.
  bool wait(Operation& operation, Clock::time_point deadline);
  // Nothing that was posted is touched any more once this has returned.
  void break_off(const std::string& why);
  std::string why_broken();

 private:
  struct Queue {
    Operation* head = nullptr;
    Operation* tail = nullptr;
  };

  // Executes what can be executed; returns when the next message is eligible, or the end of time.
  Clock::time_point match();
  void transfer(Operation& send, Operation& receive);
  void close(const std::string& why);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::array<Queue, 2> queues_;
  bool broken_ = false;
  std::string why_;
};

}  // namespace fastpipe
