// What a rank needs for one program beside the program: made on every rank, in the same order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "copy_engine_codec.h"
#include "copy_engine_link.h"
#include "copy_engine_places.h"
#include "shared_memory_source.h"
#include "transport.h"

namespace fastpipe {

class CopyEngineSource final : public TransportSource {
 public:
  // announced: how the messages of a step go that announces them; it carries every channel between ranks.
  CopyEngineSource(std::shared_ptr<CopyEngineLink> link, std::shared_ptr<const CopyCodec> codec,
                   std::shared_ptr<SharedMemorySource> announced, std::vector<CopyPlaces> places);

  std::unique_ptr<Transport> connect(const RankProgram& program, double timeout_seconds) override;

  const std::shared_ptr<CopyEngineLink>& link() const { return link_; }
  const std::shared_ptr<const CopyCodec>& codec() const { return codec_; }
  const SharedMemorySource& announced() const { return *announced_; }
  const std::vector<CopyPlaces>& places() const { return places_; }
  std::size_t number() const { return number_; }

 private:
  std::shared_ptr<CopyEngineLink> link_;
  std::shared_ptr<const CopyCodec> codec_;
  std::shared_ptr<SharedMemorySource> announced_;
  std::vector<CopyPlaces> places_;
  std::size_t number_;
};

}  // namespace fastpipe
