// Integer products with AVX2: eight 32-bit words. Included by operands_i8_avx2.h and
// operands_i8_avxvnni.h, which add the operands that are multiplied with codes.
#pragma once

namespace {

// Tokens are not side by side.
struct Sides {
  static constexpr bool kIsOn = false;
};

constexpr int kWords = 8;
constexpr int kBytes = 4 * kWords;
constexpr int kTileVectors = 1;  // of words that share the loaded factors of a query

using Bytes = __m256i;
using Table = __m256i;
using Floats = __m256;

// ---- bytes
// The compiler may not regroup sums: it would have all the looked up codes wait for them.
TQ_INLINE __m256i keep(__m256i v) {
#if defined(__GNUC__)
  __asm__("" : "+x"(v));
#endif
  return v;
}

// kBytes / PACKED bytes at p.
template <int PACKED>
TQ_INLINE auto load_row(const uint8_t* p) {
  if constexpr (PACKED == 1) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  } else {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  }
}
TQ_INLINE Bytes pack(__m128i one, __m128i two) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(one), two, 1);
}

// In each quarter: words of four rows to rows of four words.
TQ_INLINE void transpose_words(Bytes* r) {
  const __m256i a = _mm256_unpacklo_epi32(r[0], r[1]), b = _mm256_unpackhi_epi32(r[0], r[1]);
  const __m256i c = _mm256_unpacklo_epi32(r[2], r[3]), d = _mm256_unpackhi_epi32(r[2], r[3]);
  r[0] = _mm256_unpacklo_epi64(a, c);
  r[1] = _mm256_unpackhi_epi64(a, c);
  r[2] = _mm256_unpacklo_epi64(b, d);
  r[3] = _mm256_unpackhi_epi64(b, d);
}

// Bytes of four rows side by side, as words: word 4 u + i of line j comes from byte 16 u + 4 j + i
// of rows of 32 bytes. Of these lines 2 * HALF and the next.
template <int HALF>
TQ_INLINE void interleave(__m256i a, __m256i b, __m256i c, __m256i d, Bytes* lines) {
  const __m256i ab = HALF == 0 ? _mm256_unpacklo_epi8(a, b) : _mm256_unpackhi_epi8(a, b);
  const __m256i cd = HALF == 0 ? _mm256_unpacklo_epi8(c, d) : _mm256_unpackhi_epi8(c, d);
  lines[0] = _mm256_unpacklo_epi16(ab, cd);
  lines[1] = _mm256_unpackhi_epi16(ab, cd);
}
// Rows of 16 bytes: the four lines side by side in two.
template <int HALF>
TQ_INLINE void interleave(__m128i a, __m128i b, __m128i c, __m128i d, Bytes* lines) {
  const __m128i ab = _mm_unpacklo_epi8(a, b), high_ab = _mm_unpackhi_epi8(a, b);
  const __m128i cd = _mm_unpacklo_epi8(c, d), high_cd = _mm_unpackhi_epi8(c, d);
  lines[0] = pack(_mm_unpacklo_epi16(ab, cd), _mm_unpackhi_epi16(ab, cd));
  lines[1] = pack(_mm_unpacklo_epi16(high_ab, high_cd), _mm_unpackhi_epi16(high_ab, high_cd));
}

// ---- codes
// Shifts of 16-bit units: what comes from the neighbouring byte lies above the bits that count.
template <int N>
TQ_INLINE Bytes shift_right(Bytes b) {
  if constexpr (N == 0) return b;
  return _mm256_srli_epi16(b, N);
}
template <int N>
TQ_INLINE Bytes shift_left(Bytes b) {
  if constexpr (N == 0) return b;
  return _mm256_slli_epi16(b, N);
}
// Of every byte bits 0 and 1 of a, bits 2 and 3 of b, and zeros.
TQ_INLINE Bytes two_bits_of(Bytes a, Bytes b) {
  return _mm256_or_si256(_mm256_and_si256(a, _mm256_set1_epi8(3)),
                         _mm256_and_si256(b, _mm256_set1_epi8(12)));
}
TQ_INLINE Bytes nibbles(Bytes b) { return _mm256_and_si256(b, _mm256_set1_epi8(15)); }
TQ_INLINE Table make_value_table(const int8_t* entries) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(entries)));
}
TQ_INLINE Table make_key_table(const int8_t* entries, int begin) {
  return _mm256_add_epi8(make_value_table(entries), _mm256_set1_epi8(static_cast<char>(begin)));
}
// By bytes below 16.
TQ_INLINE Bytes found(Table table, Bytes index) { return _mm256_shuffle_epi8(table, index); }
// In the second table where bit BIT of `bits` is set.
template <int BIT>
TQ_INLINE Bytes found_of_two(Table first, Table second, Bytes index, Bytes bits) {
  return _mm256_blendv_epi8(found(first, index), found(second, index), shift_left<7 - BIT>(bits));
}

// ---- products
TQ_INLINE __m256i zero_sums() { return _mm256_setzero_si256(); }
// Of a vector of words: the sums over the quarters that hold the same tokens, as floats times
// `step`, in the tokens' order; `total` is what the keys' beginning adds to each.
template <int PACKED>
TQ_INLINE void store_scores(const __m256i* sums, int32_t total, float step, float* scores) {
  const __m256i offset = _mm256_set1_epi32(total);
  const __m256 by = _mm256_set1_ps(step);
  if constexpr (PACKED == 2) {
    _mm256_storeu_ps(scores,
                     _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(*sums, offset)), by));
    return;
  }
  const __m128i both =
      _mm_add_epi32(_mm256_castsi256_si128(*sums), _mm256_extracti128_si256(*sums, 1));
  const __m128i numbers = _mm_sub_epi32(both, _mm256_castsi256_si128(offset));
  _mm_storeu_ps(scores, _mm_mul_ps(_mm_cvtepi32_ps(numbers), _mm256_castps256_ps128(by)));
}
TQ_INLINE Floats value_sums(__m256i sums) { return _mm256_cvtepi32_ps(sums); }

// ---- numbers
TQ_INLINE Floats load_floats(const float* p) { return _mm256_loadu_ps(p); }
TQ_INLINE void store_floats(float* p, Floats v) { _mm256_storeu_ps(p, v); }
TQ_INLINE Floats spread(float x) { return _mm256_set1_ps(x); }
TQ_INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
TQ_INLINE Floats product(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
TQ_INLINE Floats difference(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
TQ_INLINE Floats total_of_floats(Floats a, Floats b) { return _mm256_add_ps(a, b); }
TQ_INLINE Floats magnitude(Floats a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
TQ_INLINE Floats largest_magnitude(Floats a, Floats b) { return _mm256_max_ps(a, magnitude(b)); }
TQ_INLINE float largest_lane(Floats v) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
TQ_INLINE float sum_of_lanes(Floats v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
TQ_INLINE __m256 not_infinite(Floats v) {  // nor NaN
  return _mm256_cmp_ps(v, _mm256_set1_ps(3.402823466e38f), _CMP_LE_OQ);
}
TQ_INLINE bool all_finite(Floats v) {
  return _mm256_movemask_ps(not_infinite(magnitude(v))) == 0xff;
}
// NaN is passed over.
template <int COUNT>
TQ_INLINE float largest_of_all(const Floats* v) {
  Floats largest[2];
  largest[0] = largest[1] = _mm256_set1_ps(-__builtin_huge_valf());
  for (int i = 0; i < COUNT; ++i) largest[i % 2] = _mm256_max_ps(v[i], largest[i % 2]);
  return largest_lane(_mm256_max_ps(largest[0], largest[1]));
}
// The largest of weights as their bits, whose order is theirs: what is negative, infinite or NaN is
// larger than any weight.
using Bits = __m256i;
TQ_INLINE Bits no_bits() { return _mm256_setzero_si256(); }
TQ_INLINE Bits larger_bits(Bits a, Floats b) { return _mm256_max_epu32(a, _mm256_castps_si256(b)); }
// NaN where one was no weight.
TQ_INLINE float largest_weight(Bits most) {
  __m128i m = _mm_max_epu32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1));
  const uint32_t bits = static_cast<uint32_t>(_mm_cvtsi128_si32(m));
  return bits < 0x7f800000u ? float_of_bits(bits) : __builtin_nanf("");
}
// Whether a lane of any x was at least its limit, or no number.
using Reached = __m256;
TQ_INLINE Reached none_reached() { return _mm256_setzero_ps(); }
TQ_INLINE Reached reaches(Reached before, Floats x, Floats limit) {
  return _mm256_or_ps(before, _mm256_cmp_ps(x, limit, _CMP_NLT_UQ));
}
TQ_INLINE bool any_reached(Reached all) { return _mm256_movemask_ps(all) != 0; }
// exp(x) for x <= 0 to 3 in 10^7: 2^n times a polynomial in the rest, of minimal error on
// [-1/2, 1/2]; zero below 2^-126; NaN stays NaN. COUNT vectors step by step: one alone is a chain of
// 40 cycles.
template <int COUNT>
TQ_INLINE void exponentials_of(Floats* x) {
  const __m256 magic = _mm256_set1_ps(12582912.0f + 127.0f);  // leaves n + 127 in the last bits
  __m256 n[COUNT], p[COUNT];
  for (int i = 0; i < COUNT; ++i) {
    // NaN is the second operand and passes.
    x[i] = _mm256_max_ps(_mm256_set1_ps(-127.0f), _mm256_mul_ps(x[i], _mm256_set1_ps(1.44269504f)));
  }
  for (int i = 0; i < COUNT; ++i) n[i] = _mm256_add_ps(x[i], magic);
  for (int i = 0; i < COUNT; ++i) x[i] = _mm256_sub_ps(x[i], _mm256_sub_ps(n[i], magic));
  for (int i = 0; i < COUNT; ++i) p[i] = _mm256_set1_ps(1.3333558e-3f);
  const auto add_term = [&](float factor) TQ_INLINED {
    const __m256 next = _mm256_set1_ps(factor);
    for (int i = 0; i < COUNT; ++i) p[i] = _mm256_fmadd_ps(p[i], x[i], next);
  };
  add_term(9.6181291e-3f);
  add_term(5.5504109e-2f);
  add_term(2.4022651e-1f);
  add_term(6.9314718e-1f);
  add_term(1.0f);
  for (int i = 0; i < COUNT; ++i) {
    const __m256i power = _mm256_slli_epi32(_mm256_castps_si256(n[i]), 23);
    x[i] = _mm256_mul_ps(p[i], _mm256_castsi256_ps(power));
  }
}
TQ_INLINE Floats exponential(Floats x) {
  exponentials_of<1>(&x);
  return x;
}
using Total = __m256i;
TQ_INLINE Total zero_total() { return _mm256_setzero_si256(); }
TQ_INLINE int32_t total_of(Total t) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(t), _mm256_extracti128_si256(t, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
TQ_INLINE __m256i rounded(Floats x, float inverse) {
  return _mm256_cvtps_epi32(_mm256_mul_ps(x, _mm256_set1_ps(inverse)));
}

TQ_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

}  // namespace

#include "core/simd/operands_i8.h"

namespace {

// Queries are signed bytes.
// x[0 .. 8) / step, rounded, as two groups; adds the steps.
TQ_INLINE Total store_groups(const float* x, float inverse, Group* groups, Total total) {
  const __m256i number = rounded(_mm256_loadu_ps(x), inverse);
  const __m128i pairs =
      _mm_packs_epi32(_mm256_castsi256_si128(number), _mm256_extracti128_si256(number, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(groups), _mm_packs_epi16(pairs, pairs));
  return _mm256_add_epi32(total, number);
}

using Sums = __m256i;
using Codes = Bytes;
using Factors = __m256i;
TQ_INLINE Codes as_codes(Bytes found) { return found; }

}  // namespace
