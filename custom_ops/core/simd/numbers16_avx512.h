// Numbers of 16 bits, as two bytes each, beside the words of vec_int_avx512.h.
#pragma once

#include "core/simd/vec_int_avx512.h"

namespace {

#ifdef TQ_FEW_GROUPS
constexpr int kMaxQueries = 2;
#else
constexpr int kMaxQueries = 4;  // query rows that share the looked up codes
#endif
// Sums of values that registers hold at a time; those of one slot may be more.
constexpr int kMostSums = 12;
constexpr int kDeepQueries = 0;  // query rows up to which values are taken by whole vectors

constexpr float kLargestNumber = 32512.0f;  // 127 * 256
constexpr float kLargestWeight = 65280.0f;  // 255 * 256
constexpr int kStepRows = tq::kBlock;       // weights that are rounded to the same steps

// Four numbers 256 * high + low, as dpbusd wants them beside four unsigned bytes.
struct Group {
  int8_t high[4];
  int8_t low[4];
};
struct Sums {
  __m512i high, low;
};
struct Factors {
  __m512i high, low;
};

TQ_INLINE Sums zero_sums() { return {_mm512_setzero_si512(), _mm512_setzero_si512()}; }
TQ_INLINE Sums first_value_sums(int32_t) { return zero_sums(); }
TQ_INLINE Factors load_factors(const void* p) {
  return {keep(_mm512_loadu_si512(p)),
          keep(_mm512_loadu_si512(static_cast<const __m512i*>(p) + 1))};
}
TQ_INLINE void store_factors(const Group* groups, float* out) {
  int8_t* const at = reinterpret_cast<int8_t*>(out);
  for (int i = 0; i < kWords; ++i) {
    memcpy(at + 4 * i, groups[i].high, 4);
    memcpy(at + kBytes + 4 * i, groups[i].low, 4);
  }
}
TQ_INLINE Factors spread_factors(const Group& group) {
  int32_t high, low;
  memcpy(&high, group.high, sizeof high);
  memcpy(&low, group.low, sizeof low);
  return {keep(_mm512_set1_epi32(high)), keep(_mm512_set1_epi32(low))};
}
TQ_INLINE void add_key_products(Sums& sums, Bytes keys, const Factors& query) {
  add_product(sums.high, keys, query.high);
  add_product(sums.low, keys, query.low);
}
TQ_INLINE void add_value_products(Sums& sums, Bytes values, const Factors& weights) {
  add_product(sums.high, weights.high, values);
  add_product(sums.low, weights.low, values);
}
TQ_INLINE __m512i whole_sums(const Sums& sums) {
  return _mm512_add_epi32(_mm512_slli_epi32(sums.high, 8), sums.low);
}
TQ_INLINE Floats value_sums(const Sums& sums) { return _mm512_cvtepi32_ps(whole_sums(sums)); }
template <int PACKED>
TQ_INLINE void store_scores(const Sums* sums, int32_t total, float step, float* scores) {
  store_words<PACKED>(whole_sums(sums[0]), whole_sums(sums[1]), total, step, scores);
}

// Tokens are not side by side.
struct Sides {
  static constexpr bool kIsOn = false;
};

// Two tiles of eight tokens that are made one of sixteen.
struct Folding {
  static constexpr bool kIsOn = true;
  using Folded = __m512i;
  TQ_INLINE Folded fold(const Sums& a, const Sums& b) { return fold_words(whole_sums(a), whole_sums(b)); }
  TQ_INLINE void store(Folded a, Folded b, int32_t total, float step, float* scores) {
    store_folded_words(a, b, total, step, scores);
  }
};

// x[0 .. 16) / step, rounded, as four groups; adds the numbers.
TQ_INLINE Total store_groups(const float* x, float inverse, Group* groups, Total total) {
  const __m512i number = rounded(_mm512_loadu_ps(x), inverse);
  const __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(number, 24), 24);
  const __m512i high = _mm512_srai_epi32(_mm512_sub_epi32(number, low), 8);
  const __m128i highs = _mm512_cvtepi32_epi8(high), lows = _mm512_cvtepi32_epi8(low);
  __m128i* const out = reinterpret_cast<__m128i*>(groups);
  _mm_storeu_si128(out, _mm_unpacklo_epi32(highs, lows));
  _mm_storeu_si128(out + 1, _mm_unpackhi_epi32(highs, lows));
  return _mm512_add_epi32(total, number);
}

// COUNT vectors of weights / step, rounded; no weight is negative. Returns what first_value_sums
// wants.
template <int COUNT>
TQ_INLINE int32_t store_weights(const Floats* x, float inverse, Group* groups) {
  static_assert(COUNT % 2 == 0);
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  // In each group of four 16-bit numbers: the high bytes, then the low ones.
  const __m512i split = _mm512_broadcast_i32x4(
      _mm_setr_epi8(1, 3, 5, 7, 0, 2, 4, 6, 9, 11, 13, 15, 8, 10, 12, 14));
  for (int i = 0; i < COUNT; i += 2) {
    const __m512i a = rounded(x[i], inverse), b = rounded(x[i + 1], inverse);
    const __m512i pairs = _mm512_shuffle_epi8(_mm512_packus_epi32(a, b), split);
    _mm512_storeu_si512(groups + 4 * i, _mm512_permutexvar_epi64(order, pairs));
  }
  return 0;
}

}  // namespace
