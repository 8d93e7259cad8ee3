// What a recording of the fake device holds: everything that was done, to be done again with the same memory.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace fake_device {

class Tape {
 public:
  using Work = std::function<void()>;

  void note(Work work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    works_.push_back(std::move(work));
  }
  void replay() const {
    for (const Work& work : works_) work();
  }

 private:
  std::mutex mutex_;
  std::vector<Work> works_;
};

}  // namespace fake_device
