// Launches of simulated kernels.
#pragma once

#include <cstdint>
#include <functional>

namespace shim {

// Enqueues `kernel` for each of `cores` cores on a stream (device.h): 0, or an error. If there was
// a hazard, the stream gets one too.
uint32_t launch(uint32_t cores, void* stream, const char* name, std::function<void()> kernel);

}  // namespace shim

// A launch of kernels/library.cpp.
#define TQ_ENQUEUE(KERNEL, CORES, STREAM, TILING) \
  shim::launch(CORES, STREAM, #KERNEL, [tiling = TILING] { KERNEL(tiling); })
