// What the simulated kernel library needs from a device: the seam between it and a fake ACL
// runtime. Blocks that tests register are host memory, and without a stream a launch runs at once.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shim {

// Where the bytes of [address, address + bytes) are on the host; null if they are not all in one
// live block.
uint8_t* device_bytes(const void* address, size_t bytes);

// Runs `task(argument)` on the stream, which owns `argument`; 0 if it will run.
int enqueue(void* stream, const char* name, int (*task)(void*), void* argument);

}  // namespace shim
