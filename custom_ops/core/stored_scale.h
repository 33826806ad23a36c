// The scales that rows of split kinds store: a byte each, in equal steps of their logarithm
// (tq_onnx/codec/split.py).
#pragma once

#include <cstdint>

namespace tq {

// The byte of a scale: the nearest one, which may be 0; 0 of what is not positive.
uint8_t stored_scale(float scale);

// What the bytes 0 .. 255 stand for.
const float* scales_of_bytes();

}  // namespace tq
