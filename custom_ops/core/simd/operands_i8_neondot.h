// Queries and weights of 8 bits as bytes, beside the words of vec_int_neon.h: signed steps of queries,
// unsigned ones of weights.
// Products are of bytes with the same sign: values count from -128, and what that adds to every sum is
// taken away first.
#pragma once

#include "core/simd/vec_int_neon.h"
#include "core/simd/operands_i8.h"

namespace {

constexpr int kMaxQueries = 5;  // query rows that share the looked up codes
// Sums of values that registers hold at a time; those of one slot may be more.
constexpr int kMostSums = 20;
constexpr int kDeepQueries = 5;  // query rows up to which values are taken by whole vectors

using Codes = int8x16_t;
using Factors = int8x16_t;
using Sums = int32x4_t;
TQ_INLINE Table make_value_table(const int8_t* entries) {
  return veorq_s8(vld1q_s8(entries), vdupq_n_s8(-128));
}
TQ_INLINE Codes as_codes(int8x16_t found) { return found; }
TQ_INLINE Sums zero_sums() { return vdupq_n_s32(0); }
TQ_INLINE Sums first_value_sums(int32_t total) { return vdupq_n_s32(-128 * total); }
TQ_INLINE Factors load_factors(const void* p) { return vld1q_s8(static_cast<const int8_t*>(p)); }
TQ_INLINE Factors spread_factors(const Group& group) {
  return vreinterpretq_s8_s32(vdupq_n_s32(word_of(group)));
}
TQ_INLINE void add_key_products(Sums& sums, Codes keys, Factors query) {
  sums = vdotq_s32(sums, keys, query);
}
TQ_INLINE void add_value_products(Sums& sums, Codes values, Factors weights) {
  sums = vreinterpretq_s32_u32(vdotq_u32(vreinterpretq_u32_s32(sums), vreinterpretq_u8_s8(values),
                                         vreinterpretq_u8_s8(weights)));
}
TQ_INLINE Floats value_sums(Sums sums) { return vcvtq_f32_s32(sums); }
// The sums of four tokens as floats times `step`.
template <int PACKED>
TQ_INLINE void store_scores(const Sums* sums, int32_t, float step, float* scores) {
  vst1q_f32(scores, vmulq_n_f32(value_sums(*sums), step));
}
TQ_INLINE void store_group(int32x4_t operands, Group* group) {
  const int8x8_t bytes = vmovn_s16(vcombine_s16(vmovn_s32(operands), vmovn_s32(operands)));
  vst1_lane_s32(reinterpret_cast<int32_t*>(group), vreinterpret_s32_s8(bytes), 0);
}

}  // namespace
