#include "copy_engine_source.h"

#include <utility>

#include "copy_engine_transport.h"

namespace fastpipe {

CopyEngineSource::CopyEngineSource(std::shared_ptr<CopyEngineLink> link, std::shared_ptr<const CopyCodec> codec,
                                   std::shared_ptr<SharedMemorySource> announced, std::vector<CopyPlaces> places)
    : link_(std::move(link)),
      codec_(std::move(codec)),
      announced_(std::move(announced)),
      places_(std::move(places)),
      number_(link_->host()->number_program()) {}

std::unique_ptr<Transport> CopyEngineSource::connect(const RankProgram& program, double timeout_seconds) {
  announced_->check(program);
  return std::make_unique<CopyEngineTransport>(*this, program, timeout_seconds);
}

}  // namespace fastpipe
