// Whether a device can do what the copy-engine transport asks of it, found out by doing it.
#pragma once

#include <optional>
#include <string>

#include "copy_engine.h"

namespace fastpipe {

// Flags in the host's memory: a queue waits for one that the host sets, and writes one that the host reads. Nothing, or
// what did not work; then the engine must not be used.
std::optional<std::string> obstacle_to_flags(CopyEngine& engine, double timeout_seconds);

}  // namespace fastpipe
