// Eight lanes: AVX2, FMA and F16C.
#pragma once

#include "core/simd/gather_words.h"

namespace {

constexpr int kLanes = 8;
constexpr int kTileM = 6, kTileN = 2;
constexpr int kTallM = 4, kTallN = kTileN;
constexpr int kMaxFused = 4;
#define TQ_BISECTS  // a lookup is cheaper than several comparisons
constexpr int kMaxFusedBytes = 12;
constexpr int kScoreGroup = 2;
constexpr int kSumRegisters = 8;

using V = __m256;
using I = __m256i;
using M = __m256;
struct Table {
  __m256 low, high;
};
struct WideTable {
  Table half[2];
};

TQ_INLINE M first_lanes(int n) {
  const I lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane));
}

TQ_INLINE V zero() { return _mm256_setzero_ps(); }
TQ_INLINE V set1(float x) { return _mm256_set1_ps(x); }
TQ_INLINE V load(const float* p) { return _mm256_loadu_ps(p); }
TQ_INLINE void store(float* p, V v) { _mm256_storeu_ps(p, v); }
TQ_INLINE V load_n(const float* p, int n) {
  return _mm256_maskload_ps(p, _mm256_castps_si256(first_lanes(n)));
}
TQ_INLINE void store_n(float* p, V v, int n) {
  _mm256_maskstore_ps(p, _mm256_castps_si256(first_lanes(n)), v);
}
TQ_INLINE V keep_n(V v, int n) { return _mm256_and_ps(v, first_lanes(n)); }

TQ_INLINE V add(V a, V b) { return _mm256_add_ps(a, b); }
TQ_INLINE V sub(V a, V b) { return _mm256_sub_ps(a, b); }
TQ_INLINE V mul(V a, V b) { return _mm256_mul_ps(a, b); }
TQ_INLINE V div(V a, V b) { return _mm256_div_ps(a, b); }
TQ_INLINE V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
TQ_INLINE V abs(V a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
TQ_INLINE V copy_sign(V magnitude, V sign) {
  return _mm256_or_ps(magnitude, _mm256_and_ps(sign, _mm256_set1_ps(-0.0f)));
}
// The larger; `b` where either is NaN.
TQ_INLINE V max(V a, V b) { return _mm256_max_ps(a, b); }

TQ_INLINE M less_equal(V a, V b) { return _mm256_cmp_ps(a, b, _CMP_LE_OQ); }
TQ_INLINE M lanes_between(int low, int high) {
  return _mm256_andnot_ps(first_lanes(low), first_lanes(high));
}
TQ_INLINE M and_not(M a, M b) { return _mm256_andnot_ps(b, a); }
TQ_INLINE V select(M m, V yes, V no) { return _mm256_blendv_ps(no, yes, m); }

TQ_INLINE I round_to_int(V v) { return _mm256_cvtps_epi32(v); }
TQ_INLINE V to_float(I i) { return _mm256_cvtepi32_ps(i); }
TQ_INLINE V times_power_of_two(V v, I n) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v), _mm256_slli_epi32(n, 23)));
}

TQ_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

// ---- codes
TQ_INLINE I zero_codes() { return _mm256_setzero_si256(); }
TQ_INLINE I load_bytes(const uint8_t* p, int n) {
  if (n >= kLanes) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  uint64_t bytes = 0;
  for (int i = 0; i < n; ++i) bytes |= static_cast<uint64_t>(p[i]) << (8 * i);
  return _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<long long>(bytes)));
}
TQ_INLINE void store_bytes(uint8_t* p, I i, int) {  // head sizes are multiples of 8: always full
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
}
template <int N>
TQ_INLINE I shift_right(I i) {
  if constexpr (N == 0) return i;
  return _mm256_srli_epi32(i, N);
}
template <int N>
TQ_INLINE I shift_left(I i) {
  return _mm256_slli_epi32(i, N);
}
// N low bits of a, the others of b.
template <int N>
TQ_INLINE I low_bits_of(I a, I b) {
  const I low = _mm256_set1_epi32((1 << N) - 1);
  return _mm256_or_si256(_mm256_and_si256(low, a), _mm256_andnot_si256(low, b));
}
TQ_INLINE I count_at_least(I count, V y, V threshold) {
  return _mm256_sub_epi32(count, _mm256_castps_si256(_mm256_cmp_ps(y, threshold, _CMP_GE_OQ)));
}
TQ_INLINE Table make_table(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
// A permutation reads three bits of an index; the fourth, moved to the sign, chooses the half.
TQ_INLINE V lookup(const Table& t, I codes) {
  return _mm256_blendv_ps(_mm256_permutevar8x32_ps(t.low, codes),
                          _mm256_permutevar8x32_ps(t.high, codes),
                          _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
}

// Codes below eight.
TQ_INLINE V lookup_8(const Table& t, I codes) { return _mm256_permutevar8x32_ps(t.low, codes); }

TQ_INLINE WideTable make_wide_table(const float* p) {
  return {{make_table(p), make_table(p + 16)}};
}
TQ_INLINE V lookup(const WideTable& t, I codes) {
  return _mm256_blendv_ps(lookup(t.half[0], codes), lookup(t.half[1], codes),
                          _mm256_castsi256_ps(_mm256_slli_epi32(codes, 27)));
}

// ---- bits
TQ_INLINE I set1_int(int x) { return _mm256_set1_epi32(x); }
TQ_INLINE I bits_of(V v) { return _mm256_castps_si256(v); }
TQ_INLINE V float_of(I i) { return _mm256_castsi256_ps(i); }
TQ_INLINE I add_int(I a, I b) { return _mm256_add_epi32(a, b); }
TQ_INLINE I sub_int(I a, I b) { return _mm256_sub_epi32(a, b); }
TQ_INLINE I and_int(I a, I b) { return _mm256_and_si256(a, b); }
TQ_INLINE I or_int(I a, I b) { return _mm256_or_si256(a, b); }

// ---- across lanes
TQ_INLINE float lane_max(V v) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
TQ_INLINE float lane_sum(V v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
TQ_INLINE void store_4_sums(float* p, V a, V b, V c, V d) {
  const V s = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
}

TQ_INLINE V reversed(V v) {
  return _mm256_permutevar8x32_ps(v, _mm256_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0));
}

TQ_INLINE void transpose_lanes(V* r) {
  V t[8];
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  V u[8];
  for (int i = 0; i < 2; ++i) {
    u[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    u[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    u[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    u[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
  }
}

// ---- float16
TQ_INLINE V load_half(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
TQ_INLINE void store_half(uint16_t* p, V v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// float16, each `stride` bytes behind the one before.
TQ_INLINE V gather_half(const uint8_t* p, ptrdiff_t stride) {
  return _mm256_cvtph_ps(gather_words(p, stride));
}

// ---- rows of bytes and floats, at any address; always full, head sizes being multiples of 8
// 256ths of E4M3FN numbers, by way of float16, whose exponents reach further down; NaN is zero.
TQ_INLINE V load_fp8(const uint8_t* p, int) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m128i is_nan =
      _mm_cmpeq_epi8(_mm_or_si128(bytes, _mm_set1_epi8(-128)), _mm_set1_epi8(-1));
  const __m128i words = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_andnot_si128(is_nan, bytes)), 7);
  return _mm256_cvtph_ps(_mm_and_si128(words, _mm_set1_epi16(-0x4001)));
}
TQ_INLINE V load_int8(const uint8_t* p, int) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}
TQ_INLINE V load_half_bytes(const uint8_t* p, int) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
TQ_INLINE V load_bfloat(const uint8_t* p, int) {
  const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
}

}  // namespace
