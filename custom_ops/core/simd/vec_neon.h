// Four lanes: NEON of aarch64.
#pragma once

namespace {

constexpr int kLanes = 4;
constexpr int kTileM = 6, kTileN = 4;
constexpr int kTallM = 8, kTallN = 3;
constexpr int kMaxFused = 4;
constexpr int kMaxFusedBytes = 16;
constexpr int kScoreGroup = 4;
constexpr int kSumRegisters = 16;

using V = float32x4_t;
using I = uint32x4_t;
using M = uint32x4_t;
struct Table {
  uint8x16x4_t bytes;
};
struct WideTable {
  Table low, high;
};

TQ_INLINE M first_lanes(int n) {
  const int32_t lane[4] = {0, 1, 2, 3};
  return vcltq_s32(vld1q_s32(lane), vdupq_n_s32(n));
}

TQ_INLINE V zero() { return vdupq_n_f32(0.0f); }
TQ_INLINE V set1(float x) { return vdupq_n_f32(x); }
TQ_INLINE V load(const float* p) { return vld1q_f32(p); }
TQ_INLINE void store(float* p, V v) { vst1q_f32(p, v); }
TQ_INLINE V load_n(const float* p, int n) {
  float lanes[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return vld1q_f32(lanes);
}
TQ_INLINE void store_n(float* p, V v, int n) {
  float lanes[4];
  vst1q_f32(lanes, v);
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
}
TQ_INLINE V keep_n(V v, int n) {
  return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(v), first_lanes(n)));
}

TQ_INLINE V add(V a, V b) { return vaddq_f32(a, b); }
TQ_INLINE V sub(V a, V b) { return vsubq_f32(a, b); }
TQ_INLINE V mul(V a, V b) { return vmulq_f32(a, b); }
TQ_INLINE V div(V a, V b) { return vdivq_f32(a, b); }
TQ_INLINE V fma(V a, V b, V c) { return vfmaq_f32(c, a, b); }
TQ_INLINE V abs(V a) { return vabsq_f32(a); }
TQ_INLINE V copy_sign(V magnitude, V sign) {
  return vbslq_f32(vdupq_n_u32(0x80000000u), sign, magnitude);
}
TQ_INLINE M less_equal(V a, V b) { return vcleq_f32(a, b); }
TQ_INLINE V select(M m, V yes, V no) { return vbslq_f32(m, yes, no); }
// The larger; `b` where either is NaN.
TQ_INLINE V max(V a, V b) { return select(vcgtq_f32(a, b), a, b); }
TQ_INLINE M lanes_between(int low, int high) {
  return vbicq_u32(first_lanes(high), first_lanes(low));
}
TQ_INLINE M and_not(M a, M b) { return vbicq_u32(a, b); }

TQ_INLINE I round_to_int(V v) { return vreinterpretq_u32_s32(vcvtnq_s32_f32(v)); }
TQ_INLINE V to_float(I i) { return vcvtq_f32_s32(vreinterpretq_s32_u32(i)); }
TQ_INLINE V times_power_of_two(V v, I n) {
  return vreinterpretq_f32_u32(vaddq_u32(vreinterpretq_u32_f32(v), vshlq_n_u32(n, 23)));
}

#if defined(_MSC_VER) && !defined(__clang__)
TQ_INLINE void prefetch(const void* p) { __prefetch(p); }
#else
TQ_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
#endif

// ---- codes
TQ_INLINE I zero_codes() { return vdupq_n_u32(0); }
TQ_INLINE I load_bytes(const uint8_t* p, int n) {
  uint32_t bytes = 0;
  if (n >= kLanes) {
    memcpy(&bytes, p, sizeof bytes);
  } else {
    for (int i = 0; i < n; ++i) bytes |= static_cast<uint32_t>(p[i]) << (8 * i);
  }
  const uint8x8_t narrow = vreinterpret_u8_u32(vdup_n_u32(bytes));
  return vmovl_u16(vget_low_u16(vmovl_u8(narrow)));
}
TQ_INLINE void store_bytes(uint8_t* p, I i, int) {  // head sizes are multiples of 8: always full
  const uint16x4_t words = vmovn_u32(i);
  const uint8x8_t bytes = vmovn_u16(vcombine_u16(words, words));
  const uint32_t packed = vget_lane_u32(vreinterpret_u32_u8(bytes), 0);
  memcpy(p, &packed, sizeof packed);
}
template <int N>
TQ_INLINE I shift_right(I i) {
  if constexpr (N == 0) {
    return i;
  } else {
    return vshrq_n_u32(i, N);
  }
}
template <int N>
TQ_INLINE I shift_left(I i) {
  return vshlq_n_u32(i, N);
}
// N low bits of a, the others of b.
template <int N>
TQ_INLINE I low_bits_of(I a, I b) {
  return vbslq_u32(vdupq_n_u32((1u << N) - 1u), a, b);
}
TQ_INLINE I count_at_least(I count, V y, V threshold) {
  return vsubq_u32(count, vcgeq_f32(y, threshold));
}
TQ_INLINE Table make_table(const float* p) {
  Table t;
  for (int i = 0; i < 4; ++i) t.bytes.val[i] = vreinterpretq_u8_f32(vld1q_f32(p + 4 * i));
  return t;
}
// Looks up single bytes: code c becomes the indices 4 c, 4 c + 1, 4 c + 2, 4 c + 3.
TQ_INLINE V lookup(const Table& t, I codes) {
  const I low = vandq_u32(codes, vdupq_n_u32(15));
  const I indices = vmlaq_n_u32(vdupq_n_u32(0x03020100u), low, 0x04040404u);
  return vreinterpretq_f32_u8(vqtbl4q_u8(t.bytes, vreinterpretq_u8_u32(indices)));
}

TQ_INLINE WideTable make_wide_table(const float* p) { return {make_table(p), make_table(p + 16)}; }
// Indices beyond a table of 64 bytes give zero, or leave what is there.
TQ_INLINE V lookup(const WideTable& t, I codes) {
  const I low = vandq_u32(codes, vdupq_n_u32(31));
  const uint8x16_t indices =
      vreinterpretq_u8_u32(vmlaq_n_u32(vdupq_n_u32(0x03020100u), low, 0x04040404u));
  const uint8x16_t found = vqtbl4q_u8(t.low.bytes, indices);
  return vreinterpretq_f32_u8(vqtbx4q_u8(found, t.high.bytes, vsubq_u8(indices, vdupq_n_u8(64))));
}

// ---- bits
TQ_INLINE I set1_int(int x) { return vreinterpretq_u32_s32(vdupq_n_s32(x)); }
TQ_INLINE I bits_of(V v) { return vreinterpretq_u32_f32(v); }
TQ_INLINE V float_of(I i) { return vreinterpretq_f32_u32(i); }
TQ_INLINE I add_int(I a, I b) { return vaddq_u32(a, b); }
TQ_INLINE I sub_int(I a, I b) { return vsubq_u32(a, b); }
TQ_INLINE I and_int(I a, I b) { return vandq_u32(a, b); }
TQ_INLINE I or_int(I a, I b) { return vorrq_u32(a, b); }

// ---- across lanes
TQ_INLINE float lane_max(V v) { return vmaxvq_f32(v); }
TQ_INLINE float lane_sum(V v) { return vaddvq_f32(v); }
TQ_INLINE void store_4_sums(float* p, V a, V b, V c, V d) {
  vst1q_f32(p, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
}

TQ_INLINE V reversed(V v) {
  const V pairs = vrev64q_f32(v);
  return vextq_f32(pairs, pairs, 2);
}

TQ_INLINE void transpose_lanes(V* r) {
  const V a = vtrn1q_f32(r[0], r[1]), b = vtrn2q_f32(r[0], r[1]);
  const V c = vtrn1q_f32(r[2], r[3]), d = vtrn2q_f32(r[2], r[3]);
  const float64x2_t p = vreinterpretq_f64_f32(a), q = vreinterpretq_f64_f32(b);
  const float64x2_t s = vreinterpretq_f64_f32(c), t = vreinterpretq_f64_f32(d);
  r[0] = vreinterpretq_f32_f64(vtrn1q_f64(p, s));
  r[1] = vreinterpretq_f32_f64(vtrn1q_f64(q, t));
  r[2] = vreinterpretq_f32_f64(vtrn2q_f64(p, s));
  r[3] = vreinterpretq_f32_f64(vtrn2q_f64(q, t));
}

// ---- float16
TQ_INLINE V load_half(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
TQ_INLINE void store_half(uint16_t* p, V v) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v))); }
// float16, each `stride` bytes behind the one before.
TQ_INLINE V gather_half(const uint8_t* p, ptrdiff_t stride) {
  const auto word = [p, stride](int i) TQ_INLINED {
    uint16_t one;
    memcpy(&one, p + i * stride, sizeof one);
    return one;
  };
  uint16x4_t all = vdup_n_u16(word(0));
  all = vset_lane_u16(word(1), all, 1);
  all = vset_lane_u16(word(2), all, 2);
  all = vset_lane_u16(word(3), all, 3);
  return vcvt_f32_f16(vreinterpret_f16_u16(all));
}

// ---- rows of bytes and floats, at any address; always full, head sizes being multiples of 8
TQ_INLINE int8x8_t load_4_bytes(const uint8_t* p) {
  uint32_t bytes;
  memcpy(&bytes, p, sizeof bytes);
  return vreinterpret_s8_u32(vdup_n_u32(bytes));
}
// 256ths of E4M3FN numbers, by way of float16, whose exponents reach further down; NaN is zero.
TQ_INLINE V load_fp8(const uint8_t* p, int) {
  const int8x8_t bytes = load_4_bytes(p);
  const uint8x8_t is_nan = vceq_s8(vorr_s8(bytes, vdup_n_s8(-128)), vdup_n_s8(-1));
  const int16x8_t words = vshll_n_s8(vbic_s8(bytes, vreinterpret_s8_u8(is_nan)), 7);
  const int16x4_t half = vand_s16(vget_low_s16(words), vdup_n_s16(-0x4001));
  return vcvt_f32_f16(vreinterpret_f16_s16(half));
}
TQ_INLINE V load_int8(const uint8_t* p, int) {
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(load_4_bytes(p)))));
}
TQ_INLINE uint16x4_t load_4_words(const uint8_t* p) { return vreinterpret_u16_u8(vld1_u8(p)); }
TQ_INLINE V load_half_bytes(const uint8_t* p, int) {
  return vcvt_f32_f16(vreinterpret_f16_u16(load_4_words(p)));
}
TQ_INLINE V load_bfloat(const uint8_t* p, int) {
  return vreinterpretq_f32_u32(vshll_n_u16(load_4_words(p), 16));
}

}  // namespace
