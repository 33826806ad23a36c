// Queries and weights of 8 bits as 16-bit integers, beside the words of vec_int_avx2.h.
//
// Entries count from -128, so that a code splits into its even and odd bytes as 16-bit integers by
// a mask and a shift; what that adds to every sum is known beforehand.
#pragma once

#include "core/simd/vec_int_avx2.h"

namespace {

#ifdef TQ_FEW_GROUPS
constexpr int kMaxQueries = 1;
#else
constexpr int kMaxQueries = 3;  // query rows that share the looked up codes
#endif
// Sums of values that registers hold at a time; those of one slot may be more.
constexpr int kMostSums = 3;
constexpr int kDeepQueries = 0;  // query rows up to which values are taken by whole vectors

using Sums = __m256i;
struct Codes {
  __m256i even, odd;
};

// Four steps, as maddwd wants them beside the even and the odd bytes of a word.
struct Group {
  int16_t even[2];
  int16_t odd[2];
};

TQ_INLINE Table make_value_table(const int8_t* entries) { return make_key_table(entries); }
TQ_INLINE Codes as_codes(Bytes found) {
  return {_mm256_and_si256(found, _mm256_set1_epi16(255)), _mm256_srli_epi16(found, 8)};
}

// What the entries' beginning adds to the sums, taken away first; `total` is the weights' sum.
TQ_INLINE Sums first_value_sums(int32_t total) {
  return _mm256_slli_epi32(_mm256_set1_epi32(-total), 7);
}
struct Factors {
  __m256i even, odd;
};
TQ_INLINE Factors load_factors(const void* p) {
  return {_mm256_loadu_si256(static_cast<const __m256i*>(p)),
          _mm256_loadu_si256(static_cast<const __m256i*>(p) + 1)};
}
TQ_INLINE void store_factors(const Group* groups, float* out) {
  uint8_t* const at = reinterpret_cast<uint8_t*>(out);
  for (int i = 0; i < kWords; ++i) {
    memcpy(at + 4 * i, groups[i].even, 4);
    memcpy(at + kBytes + 4 * i, groups[i].odd, 4);
  }
}
TQ_INLINE Factors spread_factors(const Group& group) {
  int32_t even, odd;
  memcpy(&even, group.even, sizeof even);
  memcpy(&odd, group.odd, sizeof odd);
  return {_mm256_set1_epi32(even), _mm256_set1_epi32(odd)};
}
TQ_INLINE void add_products(Sums& sums, const Codes& codes, const Factors& by) {
  sums = keep(_mm256_add_epi32(sums, _mm256_add_epi32(_mm256_madd_epi16(codes.even, by.even),
                                                      _mm256_madd_epi16(codes.odd, by.odd))));
}
TQ_INLINE void add_key_products(Sums& sums, const Codes& keys, const Factors& query) {
  add_products(sums, keys, query);
}
TQ_INLINE void add_value_products(Sums& sums, const Codes& values, const Factors& weights) {
  add_products(sums, values, weights);
}

// In each group of four: the even ones, then the odd ones.
TQ_INLINE __m256i even_first(__m256i operands) {
  return _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(operands, 0xd8), 0xd8);
}
// x[0 .. 8) / step, rounded, as two groups; adds the steps.
TQ_INLINE Total store_groups(const float* x, float inverse, Group* groups, Total total) {
  const __m256i number = rounded(_mm256_loadu_ps(x), inverse);
  const __m128i pairs =
      _mm_packs_epi32(_mm256_castsi256_si128(number), _mm256_extracti128_si256(number, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(groups),
                   _mm256_castsi256_si128(even_first(_mm256_castsi128_si256(pairs))));
  return _mm256_add_epi32(total, number);
}

// COUNT vectors of weights / step, rounded; no weight is negative. Returns their sum.
template <int COUNT>
TQ_INLINE int32_t store_weights(const Floats* x, float inverse, Group* groups) {
  static_assert(COUNT % 2 == 0);
  __m256i total = _mm256_setzero_si256();
  for (int i = 0; i < COUNT; i += 2) {
    const __m256i a = rounded(x[i], inverse), b = rounded(x[i + 1], inverse);
    total = _mm256_add_epi32(total, _mm256_add_epi32(a, b));
    const __m256i pairs = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(groups + 2 * i), even_first(pairs));
  }
  return total_of(total);
}

}  // namespace
