// A rank's device and the memory of its host, for all the programs of a pipeline.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "copy_engine.h"
#include "copy_engine_layout.h"
#include "home.h"
#include "program.h"
#include "shared_memory_link.h"

namespace fastpipe {

class CopyEngineLink final {
 public:
  CopyEngineLink(std::shared_ptr<SharedMemoryLink> host, std::shared_ptr<CopyEngine> engine)
      : host_(std::move(host)), engine_(std::move(engine)) {}
  CopyEngineLink(const CopyEngineLink&) = delete;
  CopyEngineLink& operator=(const CopyEngineLink&) = delete;
  // Waits a moment for those who have not closed what they opened.
  ~CopyEngineLink();

  const std::shared_ptr<SharedMemoryLink>& host() const { return host_; }
  const std::shared_ptr<CopyEngine>& engine() const { return engine_; }

  // That of a channel, whichever the program; it lasts as long as the link. A device has few queues in hardware, and
  // what shares one waits for what a send waits for, which no proof has. So one is taken that holds up neither the
  // others nor the caller's current one. Throws Error where there is none.
  CopyQueue& queue(const Channel& channel);

  // Keeps memory that a program is done with until the peer that has opened it has closed it, or is dead: what is
  // opened must not be freed. `words` lie in `segment`.
  void bury(std::shared_ptr<CopyMemory> memory, std::shared_ptr<SharedMemorySegment> segment, const CopyWords& words,
            std::int32_t peer);

 private:
  struct Grave {
    std::shared_ptr<CopyMemory> memory;
    std::shared_ptr<SharedMemorySegment> segment;
    const CopyWords* words;
    std::int32_t peer;
  };

  using ChannelKey = std::tuple<std::int32_t, std::int32_t, ChannelKind>;

  void sweep();
  std::unique_ptr<CopyQueue> make_queue();

  const Home home_;
  std::shared_ptr<SharedMemoryLink> host_;
  std::shared_ptr<CopyEngine> engine_;
  std::map<ChannelKey, std::unique_ptr<CopyQueue>> queues_;
  std::vector<Grave> graves_;
};

}  // namespace fastpipe
