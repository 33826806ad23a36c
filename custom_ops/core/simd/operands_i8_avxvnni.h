// Queries and weights of 8 bits as bytes, beside the words of vec_int_avx2.h, for processors that have
// products of bytes: signed steps of queries, unsigned ones of weights.
#pragma once

#include "core/simd/vec_int_avx2.h"
#include "core/simd/operands_i8.h"

namespace {

#ifdef TQ_FEW_GROUPS
constexpr int kMaxQueries = 2;
#else
constexpr int kMaxQueries = 5;  // query rows that share the looked up codes
#endif
// Sums of values that registers hold at a time; those of one slot may be more.
constexpr int kMostSums = 10;
constexpr int kDeepQueries = 1;  // query rows up to which values are taken by whole vectors

using Sums = __m256i;
using Codes = Bytes;
using Factors = __m256i;

TQ_INLINE Table make_value_table(const int8_t* entries) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(entries)));
}
TQ_INLINE Codes as_codes(Bytes found) { return found; }

TQ_INLINE Sums first_value_sums(int32_t) { return zero_sums(); }
TQ_INLINE Factors load_factors(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
TQ_INLINE Factors spread_factors(const Group& group) { return _mm256_set1_epi32(word_of(group)); }
// As in vec_int_avx512.h.
TQ_INLINE void add_product(__m256i& sum, __m256i unsigned_bytes, __m256i signed_bytes) {
  __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(unsigned_bytes), "x"(signed_bytes));
}
TQ_INLINE void add_key_products(Sums& sums, Bytes keys, Factors query) {
  add_product(sums, keys, query);
}
TQ_INLINE void add_value_products(Sums& sums, Bytes values, Factors weights) {
  add_product(sums, weights, values);
}

// x[0 .. 8) / step, rounded, as two groups; adds the steps.
TQ_INLINE Total store_groups(const float* x, float inverse, Group* groups, Total total) {
  const __m256i number = rounded(_mm256_loadu_ps(x), inverse);
  const __m128i pairs =
      _mm_packs_epi32(_mm256_castsi256_si128(number), _mm256_extracti128_si256(number, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(groups), _mm_packs_epi16(pairs, pairs));
  return _mm256_add_epi32(total, number);
}

// COUNT vectors of weights / step, rounded; no weight is negative. Returns what first_value_sums
// wants.
template <int COUNT>
TQ_INLINE int32_t store_weights(const Floats* x, float inverse, Group* groups) {
  static_assert(COUNT % 2 == 0);
  for (int i = 0; i < COUNT; i += 2) {
    const __m256i a = rounded(x[i], inverse), b = rounded(x[i + 1], inverse);
    const __m256i pairs = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(groups + 2 * i),
        _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1)));
  }
  return 0;
}

}  // namespace
