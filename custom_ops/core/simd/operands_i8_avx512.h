// Queries and weights of 8 bits as bytes, beside the words of vec_int_avx512.h: signed steps of
// queries, unsigned ones of weights.
#pragma once

#include "core/simd/vec_int_avx512.h"
#include "core/simd/operands_i8.h"

namespace {

#ifdef TQ_FEW_GROUPS
constexpr int kMaxQueries = 2;
#else
constexpr int kMaxQueries = 6;  // query rows that share the looked up codes
#endif
// Sums of values that registers hold at a time; those of one slot may be more.
constexpr int kMostSums = 24;
constexpr int kDeepQueries = 2;  // query rows up to which values are taken by whole vectors

using Sums = __m512i;
using Factors = __m512i;

TQ_INLINE Sums zero_sums() { return _mm512_setzero_si512(); }
TQ_INLINE Sums first_value_sums(int32_t) { return zero_sums(); }
TQ_INLINE Factors load_factors(const void* p) { return keep(_mm512_loadu_si512(p)); }
TQ_INLINE Factors spread_factors(const Group& group) {
  return keep(_mm512_set1_epi32(word_of(group)));
}
TQ_INLINE void add_key_products(Sums& sums, Bytes keys, Factors query) {
  add_product(sums, keys, query);
}
TQ_INLINE void add_value_products(Sums& sums, Bytes values, Factors weights) {
  add_product(sums, weights, values);
}
TQ_INLINE Floats value_sums(Sums sums) { return _mm512_cvtepi32_ps(sums); }
template <int PACKED>
TQ_INLINE void store_scores(const Sums* sums, int32_t total, float step, float* scores) {
  store_words<PACKED>(sums[0], sums[1], total, step, scores);
}

// Words of sixteen tokens, of four in each quarter.
struct Sides {
  static constexpr bool kIsOn = true;
  // Of four groups of weights each to the words of its quarter.
  TQ_INLINE Factors spread(const Group* groups) {
    const __m512i order = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    const __m128i four = _mm_loadu_si128(reinterpret_cast<const __m128i*>(groups));
    return keep(_mm512_permutexvar_epi32(order, _mm512_castsi128_si512(four)));
  }
  // Adds the sums of the quarters of four vectors times `by` to sixteen floats, four of each.
  TQ_INLINE void add_to(Sums a, Sums b, Sums c, Sums d, float by, float* at) {
    const __m512 sums = _mm512_cvtepi32_ps(fold_words(fold_words(a, b), fold_words(c, d)));
    _mm512_storeu_ps(at, _mm512_fmadd_ps(sums, _mm512_set1_ps(by), _mm512_loadu_ps(at)));
  }
  TQ_INLINE Bytes transposed(Bytes rows) { return transpose_bytes(rows); }
  // The words of each quarter moved on by BYTES bytes, of each row.
  TQ_INLINE Bytes moved(Bytes line, int bytes) {
    if (bytes == 1) return _mm512_shuffle_epi32(line, _MM_PERM_ADCB);
    if (bytes == 2) return _mm512_shuffle_epi32(line, _MM_PERM_BADC);
    return bytes == 3 ? _mm512_shuffle_epi32(line, _MM_PERM_CBAD) : line;
  }
};

// Two tiles of eight tokens that are made one of sixteen.
struct Folding {
  static constexpr bool kIsOn = true;
  using Folded = __m512i;
  TQ_INLINE Folded fold(const Sums* sums) { return fold_words(sums[0], sums[1]); }
  TQ_INLINE void store(Folded a, Folded b, int32_t total, float step, float* scores) {
    store_folded_words(a, b, total, step, scores);
  }
};

// x[0 .. 16) / step, rounded, as four groups; adds the steps.
TQ_INLINE Total store_groups(const float* x, float inverse, Group* groups, Total total) {
  const __m512i operands = rounded(_mm512_loadu_ps(x), inverse);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(groups), _mm512_cvtepi32_epi8(operands));
  return _mm512_add_epi32(total, operands);
}

// COUNT vectors of weights / step, rounded; no weight is negative. Returns what first_value_sums
// wants.
template <int COUNT>
TQ_INLINE int32_t store_weights(const Floats* x, float inverse, Group* groups) {
  for (int i = 0; i < COUNT; ++i) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(groups + 4 * i),
                     _mm512_cvtepi32_epi8(rounded(x[i], inverse)));
  }
  return 0;
}

}  // namespace
