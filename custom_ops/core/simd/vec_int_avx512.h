// Integer products with AVX-512 VNNI: sixteen 32-bit words. Included by operands_i8_avx512.h,
// which adds the operands that are multiplied with codes.
#pragma once

namespace {

constexpr int kWords = 16;
constexpr int kBytes = 4 * kWords;
constexpr int kTileVectors = 2;  // of words that share the loaded factors of a query

using Bytes = __m512i;
using Codes = Bytes;  // found
using Table = __m512i;
using Floats = __m512;

// ---- bytes
// The compiler may not load the vector a second time instead of keeping it: the loads of unaligned
// rows and of factors are what bounds the loops otherwise.
TQ_INLINE __m512i keep(__m512i v) {
  __asm__("" : "+v"(v));
  return v;
}

// kBytes / PACKED bytes at p.
template <int PACKED>
TQ_INLINE auto load_row(const uint8_t* p) {
  if constexpr (PACKED == 1) {
    return keep(_mm512_loadu_si512(p));
  } else if constexpr (PACKED == 2) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  } else {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  }
}
TQ_INLINE Bytes pack(__m256i one, __m256i two) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(one), two, 1);
}
// One after the other: of rows in memory an insertion is a load and no shuffle.
TQ_INLINE Bytes pack(__m128i one, __m128i two, __m128i three, __m128i four) {
  const __m512i a = _mm512_inserti32x4(_mm512_castsi128_si512(one), two, 1);
  return _mm512_inserti32x4(_mm512_inserti32x4(a, three, 2), four, 3);
}

// In each quarter: words of four rows to rows of four words.
TQ_INLINE void transpose_words(Bytes* r) {
  const __m512i a = _mm512_unpacklo_epi32(r[0], r[1]), b = _mm512_unpackhi_epi32(r[0], r[1]);
  const __m512i c = _mm512_unpacklo_epi32(r[2], r[3]), d = _mm512_unpackhi_epi32(r[2], r[3]);
  r[0] = _mm512_unpacklo_epi64(a, c);
  r[1] = _mm512_unpackhi_epi64(a, c);
  r[2] = _mm512_unpacklo_epi64(b, d);
  r[3] = _mm512_unpackhi_epi64(b, d);
}

// Bytes of four rows side by side, as words: word 4 u + i of line j comes from byte 16 u + 4 j + i
// of rows of 64 bytes. Of these lines 2 * HALF and the next.
template <int HALF>
TQ_INLINE void interleave(__m512i a, __m512i b, __m512i c, __m512i d, Bytes* lines) {
  const __m512i ab = HALF == 0 ? _mm512_unpacklo_epi8(a, b) : _mm512_unpackhi_epi8(a, b);
  const __m512i cd = HALF == 0 ? _mm512_unpacklo_epi8(c, d) : _mm512_unpackhi_epi8(c, d);
  lines[0] = _mm512_unpacklo_epi16(ab, cd);
  lines[1] = _mm512_unpackhi_epi16(ab, cd);
}
// Words of four rows in each quarter, as words that have a byte of each row.
TQ_INLINE Bytes transpose_bytes(__m512i rows) {
  return _mm512_shuffle_epi8(rows, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2,
                                                                        6, 10, 14, 3, 7, 11, 15)));
}
// Rows of 32 bytes: the four lines side by side in two. Words of the rows go to their quarters, two
// rows at a time, and bytes to their places there: few shuffles, for which there is one port.
template <int HALF>
TQ_INLINE void interleave(__m256i a, __m256i b, __m256i c, __m256i d, Bytes* lines) {
  const __m512i ab = pack(a, b), cd = pack(c, d);
  const __m512i first = _mm512_setr_epi32(0, 8, 16, 24, 4, 12, 20, 28, 1, 9, 17, 25, 5, 13, 21, 29);
  const __m512i last = _mm512_add_epi32(first, _mm512_set1_epi32(2));
  lines[0] = transpose_bytes(_mm512_permutex2var_epi32(ab, first, cd));
  lines[1] = transpose_bytes(_mm512_permutex2var_epi32(ab, last, cd));
}
// Rows of 16 bytes: in one.
template <int HALF>
TQ_INLINE void interleave(__m128i a, __m128i b, __m128i c, __m128i d, Bytes* lines) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  lines[0] = transpose_bytes(_mm512_permutexvar_epi32(order, pack(a, b, c, d)));
}

// ---- codes
// Shifts of 16-bit units: what comes from the neighbouring byte lies above the bits that count.
template <int N>
TQ_INLINE Bytes shift_right(Bytes b) {
  if constexpr (N == 0) return b;
  return _mm512_srli_epi16(b, N);
}
template <int N>
TQ_INLINE Bytes shift_left(Bytes b) {
  if constexpr (N == 0) return b;
  return _mm512_slli_epi16(b, N);
}
// Of every byte bits 0 and 1 of a, bits 2 and 3 of b, and zeros.
TQ_INLINE Bytes two_bits_of(Bytes a, Bytes b) {
  const __m512i others = _mm512_and_si512(b, _mm512_set1_epi8(12));
  return _mm512_ternarylogic_epi32(_mm512_set1_epi8(3), a, others, 0xEA);  // 3 & a | others
}
TQ_INLINE Bytes nibbles(Bytes b) { return _mm512_and_si512(b, _mm512_set1_epi8(15)); }
// dpbusd multiplies unsigned bytes with signed ones. Queries are signed, so keys count from -128;
// weights are not.
TQ_INLINE int key_begin(int) { return 128; }
TQ_INLINE Table make_key_table(const int8_t* entries, int begin) {
  const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(entries));
  return _mm512_broadcast_i32x4(_mm_add_epi8(table, _mm_set1_epi8(static_cast<char>(begin))));
}
TQ_INLINE Table make_value_table(const int8_t* entries) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(entries)));
}
// By bytes below 16.
TQ_INLINE Bytes found(Table table, Bytes index) { return _mm512_shuffle_epi8(table, index); }
// In the second table where bit BIT of `bits` is set.
template <int BIT>
TQ_INLINE Bytes found_of_two(Table first, Table second, Bytes index, Bytes bits) {
  const __mmask64 is_second = _mm512_test_epi8_mask(bits, _mm512_set1_epi8(char(1 << BIT)));
  return _mm512_mask_shuffle_epi8(found(first, index), is_second, second, index);
}
TQ_INLINE Codes as_codes(Bytes found) { return found; }

// ---- products
// An instruction, not the intrinsic: compilers load all factors of a loop beforehand, and then have
// no registers left for the sums.
TQ_INLINE void add_product(__m512i& sum, __m512i unsigned_bytes, __m512i signed_bytes) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes));
}
// Of two vectors of words: sums of pairs of quarters, side by side.
TQ_INLINE __m512i fold_words(__m512i a, __m512i b) {
  return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
}
// Of two vectors of words: the sums over the quarters that hold the same tokens, as floats times
// `step`, in the tokens' order; `total` is what the keys' beginning adds to each.
template <int PACKED>
TQ_INLINE void store_words(__m512i a, __m512i b, int32_t total, float step, float* scores) {
  const __m512i offset = _mm512_set1_epi32(total);
  const __m512 by = _mm512_set1_ps(step);
  if constexpr (PACKED == 4) {
    _mm512_storeu_ps(scores, _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(a, offset)), by));
    _mm512_storeu_ps(scores + 16,
                     _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(b, offset)), by));
    return;
  }
  const __m512i pairs = fold_words(a, b);
  if constexpr (PACKED == 2) {
    const __m512 numbers = _mm512_cvtepi32_ps(_mm512_sub_epi32(pairs, offset));
    _mm512_storeu_ps(scores, _mm512_mul_ps(numbers, by));
    return;
  }
  const __m512i all = _mm512_add_epi32(_mm512_shuffle_i32x4(pairs, pairs, 0x08),
                                       _mm512_shuffle_i32x4(pairs, pairs, 0x0d));
  const __m256i numbers =
      _mm256_sub_epi32(_mm512_castsi512_si256(all), _mm512_castsi512_si256(offset));
  _mm256_storeu_ps(scores, _mm256_mul_ps(_mm256_cvtepi32_ps(numbers), _mm512_castps512_ps256(by)));
}
// The same of four vectors, PACKED == 1, that have been folded in pairs.
TQ_INLINE void store_folded_words(__m512i a, __m512i b, int32_t total, float step, float* scores) {
  const __m512i sums = _mm512_sub_epi32(fold_words(a, b), _mm512_set1_epi32(total));
  _mm512_storeu_ps(scores, _mm512_mul_ps(_mm512_cvtepi32_ps(sums), _mm512_set1_ps(step)));
}

// ---- numbers
TQ_INLINE Floats load_floats(const float* p) { return _mm512_loadu_ps(p); }
TQ_INLINE void store_floats(float* p, Floats v) { _mm512_storeu_ps(p, v); }
TQ_INLINE Floats spread(float x) { return _mm512_set1_ps(x); }
TQ_INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
TQ_INLINE Floats product(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
TQ_INLINE Floats largest_magnitude(Floats a, Floats b) {
  return _mm512_max_ps(a, _mm512_abs_ps(b));
}
TQ_INLINE float largest_lane(Floats v) { return _mm512_reduce_max_ps(v); }
TQ_INLINE bool all_finite(Floats v) {
  return _mm512_cmp_ps_mask(_mm512_abs_ps(v), _mm512_set1_ps(3.402823466e38f), _CMP_LE_OQ) ==
         0xffff;
}
TQ_INLINE Floats difference(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
TQ_INLINE Floats total_of_floats(Floats a, Floats b) { return _mm512_add_ps(a, b); }
TQ_INLINE float sum_of_lanes(Floats v) { return _mm512_reduce_add_ps(v); }
// NaN is passed over.
template <int COUNT>
TQ_INLINE float largest_of_all(const Floats* v) {
  Floats largest = _mm512_set1_ps(-__builtin_huge_valf());
  for (int i = 0; i < COUNT; ++i) largest = _mm512_max_ps(v[i], largest);
  return _mm512_reduce_max_ps(largest);
}
// The largest of weights as their bits, whose order is theirs: what is negative, infinite or NaN is
// larger than any weight.
using Bits = __m512i;
TQ_INLINE Bits no_bits() { return _mm512_setzero_si512(); }
TQ_INLINE Bits larger_bits(Bits a, Floats b) { return _mm512_max_epu32(a, _mm512_castps_si512(b)); }
// NaN where one was no weight.
TQ_INLINE float largest_weight(Bits most) {
  const uint32_t bits = _mm512_reduce_max_epu32(most);
  return bits < 0x7f800000u ? float_of_bits(bits) : __builtin_nanf("");
}
// Whether a lane of any x was at least its limit, or no number.
using Reached = __mmask16;
TQ_INLINE Reached none_reached() { return 0; }
TQ_INLINE Reached reaches(Reached before, Floats x, Floats limit) {
  return static_cast<Reached>(before | _mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ));
}
TQ_INLINE bool any_reached(Reached all) { return all != 0; }
// exp(x) for x <= 0 to 3 in 10^7: 2^n times a polynomial in the rest, of minimal error on
// [-1/2, 1/2]; zero below 2^-149; NaN stays NaN.
TQ_INLINE Floats exponential(Floats x) {
  // NaN is the second operand and passes.
  const __m512 scaled = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
  const __m512 y = _mm512_max_ps(_mm512_set1_ps(-200.0f), scaled);
  const __m512 n = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(y, n);
  __m512 p = _mm512_set1_ps(1.3333558e-3f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.6181291e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5504109e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022651e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314718e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}
using Total = __m512i;
TQ_INLINE Total zero_total() { return _mm512_setzero_si512(); }
TQ_INLINE int32_t total_of(Total t) { return _mm512_reduce_add_epi32(t); }
TQ_INLINE __m512i rounded(Floats x, float inverse) {
  return _mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(inverse)));
}

// Into the second level: the first has too few places for what is under way from memory.
TQ_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

}  // namespace
