// float16 and bfloat16 in integer arithmetic: the same result on every machine.
#pragma once

#include <cstdint>
#include <cstring>

namespace tq {

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// The bits of the largest |x[j]|, infinity above all numbers and NaN above that. In integers, whose
// maximum compilers take of whole vectors.
inline int32_t largest_magnitude(const float* x, int size) {
  int32_t largest = 0;
  for (int j = 0; j < size; ++j) {
    const int32_t magnitude = static_cast<int32_t>(float_to_bits(x[j]) & 0x7fffffffu);
    largest = largest > magnitude ? largest : magnitude;
  }
  return largest;
}

// Whether no element is an infinity or NaN.
inline bool is_finite(const float* x, int size) { return largest_magnitude(x, size) < 0x7f800000; }

inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // infinity, or NaN (made quiet, as the hardware does)
    const uint32_t payload = (magnitude & 0x3ffu) << 13;
    return bits_to_float(sign | 0x7f800000u | payload | (payload ? 0x400000u : 0u));
  }
  if (magnitude < 0x400u) {  // zero or subnormal: an integer multiple of 2^-24, exact
    const float value = static_cast<float>(magnitude) * 5.9604644775390625e-8f;
    return bits_to_float(sign | float_to_bits(value));
  }
  return bits_to_float(sign | ((magnitude << 13) + 0x38000000u));
}

// Round to nearest, ties to even.
inline uint16_t float_to_half(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  }
  if (magnitude >= 0x477ff000u) {  // rounds to 65536 or beyond
    return static_cast<uint16_t>(sign | 0x7c00u);
  }
  if (magnitude >= 0x38800000u) {
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
  }
  const uint32_t exponent = magnitude >> 23;
  if (exponent < 102u) {  // below half of the smallest subnormal
    return static_cast<uint16_t>(sign);
  }
  const uint32_t significand = (magnitude & 0x7fffffu) | 0x800000u;
  const uint32_t shift = 126u - exponent;
  const uint32_t half_way = 1u << (shift - 1u);
  const uint32_t kept = significand >> shift;
  const uint32_t rest = significand & ((1u << shift) - 1u);
  const bool up = rest > half_way || (rest == half_way && (kept & 1u));
  return static_cast<uint16_t>(sign | (kept + up));
}

inline float bfloat_to_float(uint16_t bfloat) {
  return bits_to_float(static_cast<uint32_t>(bfloat) << 16);
}

inline uint16_t float_to_bfloat(float value) {
  const uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return static_cast<uint16_t>((bits >> 16) | 0x40u);
  }
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace tq
