// Processes for the tests of what they share: each is a rank, forked, and they meet in memory that all inherit.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

#include "core/host_memory.h"

namespace fastpipe::testing {

struct Meeting {
  std::atomic<std::int32_t> present;
  PublishedAddress addresses[8];
};

// Connects `own` of rank `rank`, a link or an exchange, to those of all others.
template <typename End>
void meet(Meeting& meeting, End& own, std::int32_t rank, std::int32_t num_ranks) {
  meeting.addresses[rank] = own.address();
  meeting.present.fetch_add(1);
  while (meeting.present.load() < num_ranks) std::this_thread::yield();
  for (std::int32_t other = 0; other < num_ranks; ++other) {
    if (other != rank) own.connect(other, meeting.addresses[other]);
  }
}

// The exit codes of the ranks; for one that was killed the signal's number, negative.
inline std::vector<int> run_processes(std::int32_t num_ranks, const std::function<int(Meeting&, std::int32_t)>& body) {
  const auto memory = SharedMemorySegment::make(sizeof(Meeting));
  Meeting& meeting = *memory->at<Meeting>(0);
  std::vector<pid_t> processes;
  for (std::int32_t rank = 0; rank < num_ranks; ++rank) {
    const pid_t process = ::fork();
    if (process == 0) std::_Exit(body(meeting, rank));
    processes.push_back(process);
  }
  std::vector<int> codes;
  for (const pid_t process : processes) {
    int status = 0;
    ::waitpid(process, &status, 0);
    codes.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
  }
  return codes;
}

}  // namespace fastpipe::testing
