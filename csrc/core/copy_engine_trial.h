// Whether a device can do what the copy-engine transport asks of it, found out by doing it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "copy_engine.h"

namespace fastpipe {

// Flags in the host's memory: a queue waits for one that the host sets, and writes one that the host reads. Nothing, or
// what did not work; then the engine must not be used.
std::optional<std::string> obstacle_to_flags(CopyEngine& engine, double timeout_seconds);

// Whether the others wait while `waiting` waits for a flag, as streams do that share a queue of the hardware. First the
// host waits until they have nothing to do; as long as one has, nothing is found out.
bool holds_up(CopyEngine& engine, CopyQueue& waiting, const std::vector<CopyQueue*>& others, double timeout_seconds);

}  // namespace fastpipe
