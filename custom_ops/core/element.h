// The float types of queries, new vectors, biases and outputs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/half.h"
#include "core/kernels.h"

namespace tq {

enum class Element { kFloat, kHalf, kBfloat };

inline std::size_t element_size(Element element) { return element == Element::kFloat ? 4 : 2; }

// A bias at or below half of the lowest finite value hides a key.
inline float hiding_bias(Element element) {
  switch (element) {
    case Element::kFloat:
      return -1.70141173e38f;
    case Element::kHalf:
      return -32752.0f;
    default:
      return -1.69476567e38f;
  }
}

// What raw rows of `bits` hold. A model in float16 has float16 rows even where ONNX Runtime runs a
// node between float32 neighbours in float32.
inline Element raw_element(Element element, int bits) {
  if (bits == 32) return Element::kFloat;
  return element == Element::kFloat ? Element::kHalf : element;
}

// `in` points at element `offset`'s base; reads `count` elements.
inline void load_floats(const Kernels& kernels, Element element, const void* in, std::size_t offset,
                        float* out, std::size_t count) {
  if (element == Element::kFloat) {
    std::memcpy(out, static_cast<const float*>(in) + offset, count * sizeof(float));
    return;
  }
  const uint16_t* const bits = static_cast<const uint16_t*>(in) + offset;
  if (element == Element::kHalf) {
    kernels.half_to_float(bits, out, count);
    return;
  }
  for (std::size_t i = 0; i < count; ++i) out[i] = bfloat_to_float(bits[i]);
}

inline void store_floats(const Kernels& kernels, Element element, const float* in, void* out,
                         std::size_t offset, std::size_t count) {
  if (element == Element::kFloat) {
    std::memcpy(static_cast<float*>(out) + offset, in, count * sizeof(float));
    return;
  }
  uint16_t* const bits = static_cast<uint16_t*>(out) + offset;
  if (element == Element::kHalf) {
    kernels.float_to_half(in, bits, count);
    return;
  }
  for (std::size_t i = 0; i < count; ++i) bits[i] = float_to_bfloat(in[i]);
}

}  // namespace tq
