#include "pairs.h"

#include <exception>

#include "clock.h"

namespace fastpipe {

void Pairs::run(std::int32_t pair, const PairPart& forward, const PairPart& backward, std::size_t position,
                Observer& observer) {
  if (forward.stage.fuse(forward.microbatch, forward.given, backward.stage, backward.microbatch, backward.given)) {
    ++counts_.fused;
    return;
  }
  if (way_ == PairWay::kInOrder || !forward.stage.may_run_beside(backward.stage)) return in_order(forward, backward);
  if (way_ == PairWay::kTogether) return together(forward, backward, position, observer);
  PairClock& clock = clocks_[pair];
  const double begin = now_seconds();
  if (clock.next()) {
    together(forward, backward, position, observer);
  } else {
    in_order(forward, backward);
  }
  clock.note(now_seconds() - begin);
}

void Pairs::in_order(const PairPart& forward, const PairPart& backward) {
  ++counts_.in_order;
  forward.stage.forward(forward.microbatch, forward.given);
  backward.stage.backward(backward.microbatch, backward.given);
}

void Pairs::together(const PairPart& forward, const PairPart& backward, std::size_t position, Observer& observer) {
  ++counts_.together;
  if (!helper_) helper_ = std::make_unique<Helper>();
  const auto part = [&backward] { backward.stage.backward(backward.microbatch, backward.given); };
  const auto job = [&] { observer.beside(position, part); };
  helper_->start(job);
  std::exception_ptr error;
  try {
    forward.stage.forward(forward.microbatch, forward.given);
  } catch (...) {
    error = std::current_exception();
  }
  const std::exception_ptr other = helper_->finish();
  if (error) std::rethrow_exception(error);
  if (other) std::rethrow_exception(other);
}

}  // namespace fastpipe
