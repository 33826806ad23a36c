// Queries and weights of 8 bits as bytes, beside the words of vec_int_avx2.h, for processors that have
// products of bytes: signed steps of queries, unsigned ones of weights.
#pragma once

#include "core/simd/vec_int_avx2.h"

namespace {

#ifdef TQ_FEW_GROUPS
constexpr int kMaxQueries = 2;
#else
constexpr int kMaxQueries = 5;  // query rows that share the looked up codes
#endif
// Sums of values that registers hold at a time; those of one slot may be more.
constexpr int kMostSums = 10;
constexpr int kDeepQueries = 1;  // query rows up to which values are taken by whole vectors

// Tiles are of one vector: none is added to another's.
struct Folding {
  static constexpr bool kIsOn = false;
};

// Entries of keys count from -128.
TQ_INLINE int key_begin(int) { return 128; }
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
