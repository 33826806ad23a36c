// Queries and weights of 8 bits as bytes, beside the words of vec_int_avx2.h, for processors that have
// no products of four bytes: two products are added in 16 bits, so that steps are chosen by what a lane
// can hold (core/lane_sums.h).
#pragma once

#include "core/simd/vec_int_avx2.h"

namespace {

#ifdef TQ_FEW_GROUPS
constexpr int kMaxQueries = 2;
#else
constexpr int kMaxQueries = 5;  // query rows that share the looked up codes
#endif

using Lanes = __m256i;  // sums of 16 bits

// Entries of keys count from the least one that there may be.
TQ_INLINE int key_begin(int largest) { return largest; }

// Instructions with an operand in memory: compilers would load many beforehand and spill them.
TQ_INLINE Lanes products_of_keys(Codes keys, const void* query) {
  Lanes sums;
  __asm__("vpmaddubsw %2, %1, %0"
          : "=x"(sums)
          : "x"(keys), "m"(*static_cast<const __m256i_u*>(query)));
  return sums;
}
TQ_INLINE Lanes products_of_values(__m256i weights, const Codes* values) {
  Lanes sums;
  __asm__("vpmaddubsw %2, %1, %0" : "=x"(sums) : "x"(weights), "m"(*values));
  return sums;
}
TQ_INLINE Lanes sum_of_lanes(Lanes a, Lanes b) { return _mm256_add_epi16(a, b); }
// Of neighbouring lanes, as words.
TQ_INLINE Sums words_of(Lanes lanes) { return _mm256_madd_epi16(lanes, _mm256_set1_epi16(1)); }
TQ_INLINE Sums sum_of_words(Sums a, Sums b) { return _mm256_add_epi32(a, b); }
TQ_INLINE __m256i spread_group(const void* group) {
  int32_t word;
  memcpy(&word, group, sizeof word);
  return _mm256_set1_epi32(word);
}

// Two tiles of four tokens that are made one of eight.
struct Folding {
  static constexpr bool kIsOn = true;
  using Folded = __m256i;
  TQ_INLINE Folded fold(const __m256i* sums) { return *sums; }
  TQ_INLINE void store(Folded a, Folded b, int32_t total, float step, float* scores) {
    const __m256i sums = _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20),
                                          _mm256_permute2x128_si256(a, b, 0x31));
    store_scores<2>(&sums, total, step, scores);
  }
};

// ---- what a lane adds
// The largest sum of one sign of two neighbours among n numbers of a slot, n a multiple of 4; with
// `other` of both slots.
TQ_INLINE float largest_lane_of(const float* slot, const float* other, int n) {
  const auto sums_of_signs = [](const float* p) TQ_INLINED {
    const __m128 x = _mm_loadu_ps(p), above = _mm_max_ps(x, _mm_setzero_ps());
    return _mm_hadd_ps(above, _mm_sub_ps(above, x));
  };
  __m128 most = _mm_setzero_ps();
  for (int i = 0; i < n; i += 4) {
    __m128 sums = sums_of_signs(slot + i);
    if (other != nullptr) sums = _mm_add_ps(sums, sums_of_signs(other + i));
    most = _mm_max_ps(most, sums);
  }
  most = _mm_max_ps(most, _mm_movehl_ps(most, most));
  return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
}
// Of sixteen weights the largest sums of what lanes of products add, of one four each or of two.
TQ_INLINE Floats lanes_of_weights(Floats a, Floats b, bool of_two) {
  const auto neighbours = [](Floats x)
                              TQ_INLINED { return _mm256_add_ps(x, _mm256_permute_ps(x, 0xb1)); };
  if (!of_two) return _mm256_max_ps(neighbours(a), neighbours(b));
  return neighbours(
      _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)));
}

// ---- steps of weights
TQ_INLINE Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
// The largest of two neighbours.
TQ_INLINE Floats largest_of_pairs(Floats x) { return larger(x, _mm256_permute_ps(x, 0xb1)); }
// The largest lane of each of eight vectors.
TQ_INLINE Floats largest_of_each(const Floats* v) {
  const auto two = [](Floats a, Floats b) TQ_INLINED {
    return larger(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  };
  const auto four = [](Floats a, Floats b) TQ_INLINED {
    return larger(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
  };
  const Floats low = four(two(v[0], v[1]), two(v[2], v[3]));
  const Floats high = four(two(v[4], v[5]), two(v[6], v[7]));
  return larger(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}
TQ_INLINE Floats quotient(Floats a, Floats b) { return _mm256_div_ps(a, b); }
// `steps` over the largest; zero where that has no inverse: such weights are zeros beside anything.
TQ_INLINE Floats inverse_steps(Floats largest, float steps) {
  const Floats has_inverse = _mm256_cmp_ps(largest, _mm256_set1_ps(1e-30f), _CMP_GT_OQ);
  return _mm256_and_ps(has_inverse, _mm256_div_ps(_mm256_set1_ps(steps), largest));
}
// 32 weights times the inverse of their step, rounded.
TQ_INLINE void store_rounded(const float* x, float inverse, void* bytes) {
  const auto number = [&](int i) TQ_INLINED { return rounded(load_floats(x + 8 * i), inverse); };
  const __m256i a = _mm256_packs_epi32(number(0), number(1));
  const __m256i b = _mm256_packs_epi32(number(2), number(3));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(static_cast<__m256i*>(bytes),
                      _mm256_permutevar8x32_epi32(_mm256_packus_epi16(a, b), order));
}

}  // namespace
