// Sixteen lanes: AVX-512 F, BW, VL and DQ.
#pragma once

#include "core/simd/gather_words.h"

namespace {

constexpr int kLanes = 16;
constexpr int kTileM = 6, kTileN = 4;  // accumulators of `multiply`, in rows and vectors
constexpr int kTallM = 8, kTallN = 3;  // likewise, for multiples of eight rows
constexpr int kMaxFused = 6;
#define TQ_BISECTS  // a lookup is cheaper than several comparisons
#define TQ_CELLS    // and one in a wide table than several lookups
constexpr int kMaxFusedBytes = 64;
#ifdef TQ_FEW_GROUPS
constexpr int kScoreGroup = 2;
#else
constexpr int kScoreGroup = 6;  // query rows that share the decoded keys of four rows
#endif
constexpr int kSumRegisters = 24;  // accumulators of accumulate_rows

using V = __m512;
using I = __m512i;
using M = __mmask16;
struct Table {
  __m512 entries;
};
struct WideTable {
  __m512 low, high;
};

TQ_INLINE M first_lanes(int n) { return static_cast<M>((1u << n) - 1u); }

TQ_INLINE V zero() { return _mm512_setzero_ps(); }
TQ_INLINE V set1(float x) { return _mm512_set1_ps(x); }
TQ_INLINE V load(const float* p) { return _mm512_loadu_ps(p); }
TQ_INLINE void store(float* p, V v) { _mm512_storeu_ps(p, v); }
TQ_INLINE V load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
TQ_INLINE void store_n(float* p, V v, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), v); }
TQ_INLINE V keep_n(V v, int n) { return _mm512_maskz_mov_ps(first_lanes(n), v); }

TQ_INLINE V add(V a, V b) { return _mm512_add_ps(a, b); }
TQ_INLINE V sub(V a, V b) { return _mm512_sub_ps(a, b); }
TQ_INLINE V mul(V a, V b) { return _mm512_mul_ps(a, b); }
TQ_INLINE V div(V a, V b) { return _mm512_div_ps(a, b); }
TQ_INLINE V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
TQ_INLINE V abs(V a) { return _mm512_abs_ps(a); }
TQ_INLINE V copy_sign(V magnitude, V sign) {
  return _mm512_or_ps(magnitude, _mm512_and_ps(sign, _mm512_set1_ps(-0.0f)));
}
// The larger; `b` where either is NaN.
TQ_INLINE V max(V a, V b) { return _mm512_max_ps(a, b); }

TQ_INLINE M less_equal(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
TQ_INLINE M lanes_between(int low, int high) {
  const I lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(low)) &
         _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(high));
}
TQ_INLINE M and_not(M a, M b) { return static_cast<M>(a & ~b); }
TQ_INLINE V select(M m, V yes, V no) { return _mm512_mask_blend_ps(m, no, yes); }

TQ_INLINE I round_to_int(V v) { return _mm512_cvtps_epi32(v); }
TQ_INLINE V to_float(I i) { return _mm512_cvtepi32_ps(i); }
TQ_INLINE V times_power_of_two(V v, I n) {
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(v), _mm512_slli_epi32(n, 23)));
}

TQ_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

// ---- codes
TQ_INLINE I zero_codes() { return _mm512_setzero_si512(); }
TQ_INLINE I load_bytes(const uint8_t* p, int n) {
  const __m128i bytes = n >= kLanes ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))
                                    : _mm_maskz_loadu_epi8(first_lanes(n), p);
  return _mm512_cvtepu8_epi32(bytes);
}
TQ_INLINE void store_bytes(uint8_t* p, I i, int n) {
  if (n >= kLanes) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(i));
  } else {
    _mm512_mask_cvtepi32_storeu_epi8(p, first_lanes(n), i);
  }
}
template <int N>
TQ_INLINE I shift_right(I i) {
  if constexpr (N == 0) return i;
  return _mm512_srli_epi32(i, N);
}
template <int N>
TQ_INLINE I shift_left(I i) {
  return _mm512_slli_epi32(i, N);
}
// N low bits of a, the others of b.
template <int N>
TQ_INLINE I low_bits_of(I a, I b) {
  return _mm512_ternarylogic_epi32(_mm512_set1_epi32((1 << N) - 1), a, b, 0xCA);
}
TQ_INLINE I count_at_least(I count, V y, V threshold) {
  const M m = _mm512_cmp_ps_mask(y, threshold, _CMP_GE_OQ);
  return _mm512_mask_add_epi32(count, m, count, _mm512_set1_epi32(1));
}
TQ_INLINE Table make_table(const float* p) { return {_mm512_loadu_ps(p)}; }
TQ_INLINE V lookup(const Table& t, I codes) { return _mm512_permutexvar_ps(codes, t.entries); }
TQ_INLINE V lookup_8(const Table& t, I codes) { return lookup(t, codes); }

TQ_INLINE WideTable make_wide_table(const float* p) {
  return {_mm512_loadu_ps(p), _mm512_loadu_ps(p + 16)};
}
TQ_INLINE V lookup(const WideTable& t, I codes) {
  return _mm512_permutex2var_ps(t.low, codes, t.high);
}

// ---- bits
TQ_INLINE I set1_int(int x) { return _mm512_set1_epi32(x); }
TQ_INLINE I bits_of(V v) { return _mm512_castps_si512(v); }
TQ_INLINE V float_of(I i) { return _mm512_castsi512_ps(i); }
TQ_INLINE I add_int(I a, I b) { return _mm512_add_epi32(a, b); }
TQ_INLINE I sub_int(I a, I b) { return _mm512_sub_epi32(a, b); }
TQ_INLINE I and_int(I a, I b) { return _mm512_and_si512(a, b); }
TQ_INLINE I or_int(I a, I b) { return _mm512_or_si512(a, b); }

// ---- 16-bit numbers
TQ_INLINE void store_words(int16_t* p, I i) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(i));
}

// ---- across lanes
TQ_INLINE float lane_max(V v) { return _mm512_reduce_max_ps(v); }
TQ_INLINE float lane_sum(V v) { return _mm512_reduce_add_ps(v); }
TQ_INLINE void store_4_sums(float* p, V a, V b, V c, V d) {
  const V ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const V cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const V abcd = _mm512_add_ps(
      _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))),
      _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
  _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

TQ_INLINE V reversed(V v) {
  const I last = _mm512_setr_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  return _mm512_permutexvar_ps(last, v);
}

TQ_INLINE void transpose_lanes(V* r) {
  V t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(t[4 * i]), b = _mm512_castps_pd(t[4 * i + 2]);
    const __m512d c = _mm512_castps_pd(t[4 * i + 1]), d = _mm512_castps_pd(t[4 * i + 3]);
    r[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
    r[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    r[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(c, d));
    r[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(c, d));
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
  }
}

// ---- float16
TQ_INLINE V load_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
TQ_INLINE void store_half(uint16_t* p, V v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// float16, each `stride` bytes behind the one before.
TQ_INLINE V gather_half(const uint8_t* p, ptrdiff_t stride) {
  return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(gather_words(p, stride)),
                                                 gather_words(p + 8 * stride, stride), 1));
}

// ---- rows of bytes and floats, at any address; lanes from n on are zero
// 256ths of E4M3FN numbers, by way of float16, whose exponents reach further down; NaN is zero.
TQ_INLINE V load_fp8(const uint8_t* p, int n) {
  const __m128i bytes = n >= kLanes ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))
                                    : _mm_maskz_loadu_epi8(first_lanes(n), p);
  const M is_number =
      _mm_cmpneq_epi8_mask(_mm_or_si128(bytes, _mm_set1_epi8(-128)), _mm_set1_epi8(-1));
  const __m256i words = _mm256_slli_epi16(_mm256_maskz_cvtepi8_epi16(is_number, bytes), 7);
  return _mm512_cvtph_ps(_mm256_and_si256(words, _mm256_set1_epi16(-0x4001)));
}
TQ_INLINE V load_int8(const uint8_t* p, int n) {
  const __m128i bytes = n >= kLanes ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))
                                    : _mm_maskz_loadu_epi8(first_lanes(n), p);
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}
TQ_INLINE __m256i load_words(const uint8_t* p, int n) {
  return n >= kLanes ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))
                     : _mm256_maskz_loadu_epi16(first_lanes(n), p);
}
TQ_INLINE V load_half_bytes(const uint8_t* p, int n) { return _mm512_cvtph_ps(load_words(p, n)); }
TQ_INLINE V load_bfloat(const uint8_t* p, int n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_words(p, n)), 16));
}

}  // namespace
