// The kernel levels that this processor has the instructions for.
#pragma once

#include <vector>

namespace tq {

// Names, best first, `scalar` last; whether a level is part of this library or not.
const std::vector<const char*>& levels_of_processor();
bool has_level(const char* name);

}  // namespace tq
