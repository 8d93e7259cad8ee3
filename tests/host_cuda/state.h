// What all parts share. It lives as long as the process, as the threads of queues outlast everything else.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "streams.h"

namespace host_cuda {

struct State {
  struct Queues {
    std::vector<std::unique_ptr<Queue>> made;
    std::size_t dealt = 0;
  };

  State();
  Queue* deal(int device, int priority);

  std::mutex mutex;
  std::map<std::pair<int, int>, Queues> queues;  // by device and priority
  std::vector<Stream> default_streams;
  std::set<Stream*> streams;
  std::set<std::shared_ptr<Recording>> captures;
  std::uint64_t last_capture = 0;
};

State& state();

// Sometimes a device is slow, where the environment wants it, so that others are not always where one expects them.
void dawdle();

}  // namespace host_cuda
