// Integer products with NEON of aarch64: four 32-bit words. Included by operands_i16_neon.h and, for
// processors that have the instructions for products of bytes, operands_i8_neondot.h, which add the
// operands that are multiplied with codes.
#pragma once

namespace {

// Tokens are not side by side.
struct Sides {
  static constexpr bool kIsOn = false;
};

constexpr int kWords = 4;
constexpr int kBytes = 4 * kWords;
constexpr int kTileVectors = 1;  // of words that share the loaded factors of a query
// Tiles are of one vector: none is added to another's.
struct Folding {
  static constexpr bool kIsOn = false;
};

using Bytes = uint8x16_t;
using Table = int8x16_t;
using Floats = float32x4_t;

// ---- bytes
template <int PACKED>
TQ_INLINE Bytes load_row(const uint8_t* p) {
  static_assert(PACKED == 1);
  return vld1q_u8(p);
}

// Words of four rows to rows of four words.
TQ_INLINE void transpose_words(Bytes* r) {
  const auto low = [](Bytes x, Bytes y) TQ_INLINED {
    return vreinterpretq_u64_u32(vzip1q_u32(vreinterpretq_u32_u8(x), vreinterpretq_u32_u8(y)));
  };
  const auto high = [](Bytes x, Bytes y) TQ_INLINED {
    return vreinterpretq_u64_u32(vzip2q_u32(vreinterpretq_u32_u8(x), vreinterpretq_u32_u8(y)));
  };
  const uint64x2_t a = low(r[0], r[1]), b = high(r[0], r[1]);
  const uint64x2_t c = low(r[2], r[3]), d = high(r[2], r[3]);
  r[0] = vreinterpretq_u8_u64(vzip1q_u64(a, c));
  r[1] = vreinterpretq_u8_u64(vzip2q_u64(a, c));
  r[2] = vreinterpretq_u8_u64(vzip1q_u64(b, d));
  r[3] = vreinterpretq_u8_u64(vzip2q_u64(b, d));
}

// Bytes of four rows side by side, as words: word i of line j comes from byte 4 j + i. Of these
// lines 2 * HALF and the next.
template <int HALF>
TQ_INLINE void interleave(Bytes a, Bytes b, Bytes c, Bytes d, Bytes* lines) {
  const uint16x8_t ab = vreinterpretq_u16_u8(HALF == 0 ? vzip1q_u8(a, b) : vzip2q_u8(a, b));
  const uint16x8_t cd = vreinterpretq_u16_u8(HALF == 0 ? vzip1q_u8(c, d) : vzip2q_u8(c, d));
  lines[0] = vreinterpretq_u8_u16(vzip1q_u16(ab, cd));
  lines[1] = vreinterpretq_u8_u16(vzip2q_u16(ab, cd));
}

// ---- codes
template <int N>
TQ_INLINE Bytes shift_right(Bytes b) {
  if constexpr (N == 0) {
    return b;
  } else {
    return vshrq_n_u8(b, N);
  }
}
template <int N>
TQ_INLINE Bytes shift_left(Bytes b) {
  return vshlq_n_u8(b, N);
}
// Of every byte bits 0 and 1 of a, bits 2 and 3 of b, and zeros.
TQ_INLINE Bytes two_bits_of(Bytes a, Bytes b) {
  return vbslq_u8(vdupq_n_u8(3), a, vandq_u8(b, vdupq_n_u8(12)));
}
TQ_INLINE Bytes nibbles(Bytes b) { return vandq_u8(b, vdupq_n_u8(15)); }
TQ_INLINE int key_begin(int) { return 0; }
TQ_INLINE Table make_key_table(const int8_t* entries, int) { return vld1q_s8(entries); }
// By bytes below 16.
TQ_INLINE int8x16_t found(Table table, Bytes index) { return vqtbl1q_s8(table, index); }
// In the second table where bit BIT of `bits` is set.
template <int BIT>
TQ_INLINE int8x16_t found_of_two(Table first, Table second, Bytes index, Bytes bits) {
  const Bytes is_second = vtstq_u8(bits, vdupq_n_u8(1 << BIT));
  return vqtbl2q_s8({{first, second}}, vorrq_u8(index, vandq_u8(is_second, vdupq_n_u8(16))));
}

// ---- numbers
TQ_INLINE Floats load_floats(const float* p) { return vld1q_f32(p); }
TQ_INLINE void store_floats(float* p, Floats v) { vst1q_f32(p, v); }
TQ_INLINE Floats spread(float x) { return vdupq_n_f32(x); }
TQ_INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
TQ_INLINE Floats product(Floats a, Floats b) { return vmulq_f32(a, b); }
TQ_INLINE Floats difference(Floats a, Floats b) { return vsubq_f32(a, b); }
TQ_INLINE Floats total_of_floats(Floats a, Floats b) { return vaddq_f32(a, b); }
TQ_INLINE Floats largest_magnitude(Floats a, Floats b) { return vmaxq_f32(a, vabsq_f32(b)); }
TQ_INLINE float largest_lane(Floats v) { return vmaxvq_f32(v); }
TQ_INLINE float sum_of_lanes(Floats v) { return vaddvq_f32(v); }
TQ_INLINE uint32x4_t not_infinite(Floats v) {  // nor NaN
  return vcleq_f32(v, vdupq_n_f32(3.402823466e38f));
}
TQ_INLINE bool all_finite(Floats v) { return vminvq_u32(not_infinite(vabsq_f32(v))) != 0; }
// NaN is passed over.
template <int COUNT>
TQ_INLINE float largest_of_all(const Floats* v) {
  Floats largest = vdupq_n_f32(-__builtin_huge_valf());
  for (int i = 0; i < COUNT; ++i) largest = vmaxnmq_f32(v[i], largest);
  return vmaxvq_f32(largest);
}
// The largest of weights as their bits, whose order is theirs: what is negative, infinite or NaN is
// larger than any weight.
using Bits = uint32x4_t;
TQ_INLINE Bits no_bits() { return vdupq_n_u32(0); }
TQ_INLINE Bits larger_bits(Bits a, Floats b) { return vmaxq_u32(a, vreinterpretq_u32_f32(b)); }
// NaN where one was no weight.
TQ_INLINE float largest_weight(Bits most) {
  const uint32_t bits = vmaxvq_u32(most);
  return bits < 0x7f800000u ? float_of_bits(bits) : __builtin_nanf("");
}
// Whether a lane of any x was at least its limit, or no number.
using Reached = uint32x4_t;
TQ_INLINE Reached none_reached() { return vdupq_n_u32(0); }
TQ_INLINE Reached reaches(Reached before, Floats x, Floats limit) {
  return vornq_u32(before, vcltq_f32(x, limit));
}
TQ_INLINE bool any_reached(Reached all) { return vmaxvq_u32(all) != 0; }
// exp(x) for x <= 0 to 3 in 10^7: 2^n times a polynomial in the rest, of minimal error on
// [-1/2, 1/2]; zero below 2^-149; NaN stays NaN.
TQ_INLINE Floats exponential(Floats x) {
  const Floats y = vmaxq_f32(vdupq_n_f32(-200.0f), vmulq_n_f32(x, 1.44269504f));
  const Floats n = vrndnq_f32(y);
  const Floats f = vsubq_f32(y, n);
  Floats p = vdupq_n_f32(1.3333558e-3f);
  p = vfmaq_f32(vdupq_n_f32(9.6181291e-3f), p, f);
  p = vfmaq_f32(vdupq_n_f32(5.5504109e-2f), p, f);
  p = vfmaq_f32(vdupq_n_f32(2.4022651e-1f), p, f);
  p = vfmaq_f32(vdupq_n_f32(6.9314718e-1f), p, f);
  p = vfmaq_f32(vdupq_n_f32(1.0f), p, f);
  // 2^n in two steps: it may be smaller than the smallest normal number.
  const int32x4_t all = vcvtnq_s32_f32(n), half = vshrq_n_s32(all, 1);
  const auto power = [](int32x4_t exponent) TQ_INLINED {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(exponent, vdupq_n_s32(127)), 23));
  };
  return vmulq_f32(vmulq_f32(p, power(half)), power(vsubq_s32(all, half)));
}
using Total = int32x4_t;
TQ_INLINE Total zero_total() { return vdupq_n_s32(0); }
TQ_INLINE int32_t total_of(Total t) { return vaddvq_s32(t); }
TQ_INLINE int32x4_t rounded(Floats x, float inverse) {
  return vcvtnq_s32_f32(vmulq_n_f32(x, inverse));
}

// ---- groups of numbers; the files that include this one say what a group is, and store_group
// x[0 .. 4) / step, rounded, as a group; adds the numbers.
template <class Group>
TQ_INLINE Total store_groups(const float* x, float inverse, Group* groups, Total total) {
  const int32x4_t numbers = rounded(vld1q_f32(x), inverse);
  store_group(numbers, groups);
  return vaddq_s32(total, numbers);
}
// COUNT vectors of weights / step, rounded; no weight is negative. Returns the numbers' sum.
template <int COUNT, class Group>
TQ_INLINE int32_t store_weights(const Floats* x, float inverse, Group* groups) {
  Total total = zero_total();
  for (int i = 0; i < COUNT; ++i) {
    const int32x4_t numbers = rounded(x[i], inverse);
    store_group(numbers, groups + i);
    total = vaddq_s32(total, numbers);
  }
  return total_of(total);
}

TQ_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }

}  // namespace
