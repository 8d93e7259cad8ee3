// The abstract machine of fastpipe/machine.py: ranks, lanes, messages. Validation and simulation both run it.
#pragma once

#include <deque>
#include <vector>

#include "plan/orders.h"

namespace fastpipe::plan {

// A SEND or a POST_RECV in its queue.
struct Transfer {
  int64_t position;
  double posted;
  int32_t rank;
  int32_t channel;
  int32_t slot;
  bool sends;
};

class Machine {
 public:
  // Seconds without costs are all zero; without starts and ends no times are kept. `late`: a receive enters its lane
  // only when it, or a later one of its channel, is waited for.
  Machine(const Orders& program, const int32_t* lane_of, const PlanCosts* costs, double* const* starts,
          double* const* ends, bool late = false);
  // Whether every rank came to its end; false too for a program that only the Python code can judge.
  bool run();

 private:
  enum class Wait : int8_t { kNothing, kReceive, kSend };

  double compute_seconds(const Rows& rows, int64_t i) const;
  double transfer_seconds(int32_t channel, int32_t consumer_stage) const;
  bool measure(int32_t rank);
  void find_ends(const int32_t* lane_of);
  bool advance(int32_t rank);
  bool step(int32_t rank, const Rows& rows, int64_t i);
  bool wait(int32_t rank, bool sends, int32_t slot);
  bool post(int32_t rank, const Rows& rows, int64_t i);
  void release(int32_t rank, const Rows& rows, int64_t i);
  void enqueue(const Transfer& transfer);
  void match(int32_t end);
  void complete(const Transfer& send, const Transfer& receive);
  void finish(const Transfer& transfer, double done);
  std::vector<double>& done(int32_t rank, bool sends) { return sends ? sends_[rank] : receives_[rank]; }
  int32_t end_of(int32_t channel, bool sends) const { return sends ? source_end_[channel] : destination_end_[channel]; }

  const Orders& program_;
  const PlanCosts* const costs_;
  double* const* starts_;
  double* const* ends_;
  std::vector<double> clock_;
  std::vector<int64_t> position_;
  std::vector<std::vector<double>> sends_;     // by slot: when it was done, kUnderWay, kHeld, or kNothing
  std::vector<std::vector<double>> receives_;  // the same
  std::vector<int32_t> source_end_;
  std::vector<int32_t> destination_end_;
  std::vector<std::deque<Transfer>> queues_;  // by end
  std::vector<std::deque<Transfer>> held_;    // by channel: late receives that nobody has waited for yet
  std::vector<double> end_free_;
  std::vector<Wait> blocked_;
  std::vector<int32_t> blocked_slot_;
  std::vector<int32_t> ready_;
  std::vector<int32_t> pending_;
  const bool late_;
  bool malformed_ = false;
};

}  // namespace fastpipe::plan
