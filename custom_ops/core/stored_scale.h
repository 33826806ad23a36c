// The scales that rows of split kinds store: a byte each, in equal steps of their logarithm
// (tq_onnx/codec/split.py).
#pragma once

#include <cstdint>

namespace tq {

// Byte of the nearest stored scale, which may be 0; 0 if `scale` is not positive.
uint8_t stored_scale(float scale);

// The scales of the bytes 0 .. 255.
const float* scales_of_bytes();

}  // namespace tq
