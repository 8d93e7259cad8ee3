#include "loopback_lane.h"

#include <algorithm>

namespace fastpipe {

namespace {

using Operation = LoopbackOperation;

std::string text(const Operation& operation) {
  return std::string(operation.is_send ? "a send" : "a receive") + " on channel " + std::to_string(operation.channel) +
         " for stage " + std::to_string(operation.stage) + ", microbatch " + std::to_string(operation.microbatch);
}

bool fit(const Operation& one, const Operation& other) {
  return one.is_send != other.is_send && one.channel == other.channel && one.stage == other.stage &&
         one.microbatch == other.microbatch;
}

}  // namespace

bool LoopbackLane::post(int end, Operation& operation) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (broken_) return false;
  Queue& queue = queues_[end];
  operation.next = nullptr;
  (queue.head == nullptr ? queue.head : queue.tail->next) = &operation;
  queue.tail = &operation;
  // Who waits at the other end must learn until when a delayed send holds it up.
  if (match() != Clock::time_point::max()) changed_.notify_all();
  return true;
}

bool LoopbackLane::wait(Operation& operation, Clock::time_point deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    const Clock::time_point next = match();
    if (operation.done) return true;
    if (broken_) return false;
    if (Clock::now() >= deadline) {
      close(text(operation) + " was not met by the other side in time");
      return false;
    }
    changed_.wait_until(lock, std::min(next, deadline));
  }
}

void LoopbackLane::break_off(const std::string& why) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!broken_) close(why);
}

std::string LoopbackLane::why_broken() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return why_;
}

Clock::time_point LoopbackLane::match() {
  while (queues_[0].head != nullptr && queues_[1].head != nullptr) {
    Operation& lower = *queues_[0].head;
    Operation& higher = *queues_[1].head;
    if (!fit(lower, higher)) {
      // What is first in line stays first: this cannot resolve itself.
      close("deadlock: the lower rank has " + text(lower) + " first in line, the higher rank " + text(higher));
      break;
    }
    Operation& send = lower.is_send ? lower : higher;
    if (send.eligible != Clock::time_point{} && send.eligible > Clock::now()) return send.eligible;
    for (Queue& queue : queues_) queue.head = queue.head->next;
    transfer(send, lower.is_send ? higher : lower);
  }
  return Clock::time_point::max();
}

void LoopbackLane::transfer(Operation& send, Operation& receive) {
  receive.stand_in = send.source == nullptr;
  try {
    if (!receive.stand_in) receive.target->copy_from(*send.source);
  } catch (...) {
    receive.error = std::current_exception();
  }
  send.completed = receive.completed = now_seconds();
  send.done = receive.done = true;
  changed_.notify_all();
}

void LoopbackLane::close(const std::string& why) {
  broken_ = true;
  why_ = why;
  queues_ = {};
  changed_.notify_all();
}

}  // namespace fastpipe
