// Queries and weights of 8 bits as 16-bit integers, beside the words of vec_int_neon.h.
#pragma once

#include "core/simd/vec_int_neon.h"

namespace {

constexpr int kMaxQueries = 2;   // query rows that share the looked up codes
// Sums of values that registers hold at a time; those of one slot may be more.
constexpr int kMostSums = 3;
constexpr int kDeepQueries = 0;  // query rows up to which values are taken by whole vectors

struct Group {
  int16_t number[4];
};
struct Codes {
  int16x8_t low, high;
};
using Factors = Codes;
// The products of word i: their sum is taken at the end.
struct Sums {
  int32x4_t word[4];
};
TQ_INLINE Table make_value_table(const int8_t* entries) { return make_key_table(entries, 0); }
TQ_INLINE Codes as_codes(int8x16_t found) {
  return {vmovl_s8(vget_low_s8(found)), vmovl_high_s8(found)};
}
TQ_INLINE Sums zero_sums() {
  return {{vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0)}};
}
TQ_INLINE Sums first_value_sums(int32_t) { return zero_sums(); }
TQ_INLINE Factors load_factors(const void* p) {
  return {vld1q_s16(static_cast<const int16_t*>(p)), vld1q_s16(static_cast<const int16_t*>(p) + 8)};
}
TQ_INLINE void store_factors(const Group* groups, float* out) {
  memcpy(out, groups, kWords * sizeof *groups);
}
TQ_INLINE Factors spread_factors(const Group& group) {
  const int16x4_t operands = vld1_s16(group.number);
  const int16x8_t twice = vcombine_s16(operands, operands);
  return {twice, twice};
}
TQ_INLINE void add_products(Sums& sums, const Codes& codes, const Factors& by) {
  sums.word[0] = vmlal_s16(sums.word[0], vget_low_s16(codes.low), vget_low_s16(by.low));
  sums.word[1] = vmlal_high_s16(sums.word[1], codes.low, by.low);
  sums.word[2] = vmlal_s16(sums.word[2], vget_low_s16(codes.high), vget_low_s16(by.high));
  sums.word[3] = vmlal_high_s16(sums.word[3], codes.high, by.high);
}
TQ_INLINE void add_key_products(Sums& sums, const Codes& keys, const Factors& query) {
  add_products(sums, keys, query);
}
TQ_INLINE void add_value_products(Sums& sums, const Codes& values, const Factors& weights) {
  add_products(sums, values, weights);
}
TQ_INLINE Floats value_sums(const Sums& sums) {
  return vcvtq_f32_s32(
      vpaddq_s32(vpaddq_s32(sums.word[0], sums.word[1]), vpaddq_s32(sums.word[2], sums.word[3])));
}
// The sums of four tokens as floats times `step`.
template <int PACKED>
TQ_INLINE void store_scores(const Sums* sums, int32_t, float step, float* scores) {
  vst1q_f32(scores, vmulq_n_f32(value_sums(*sums), step));
}
TQ_INLINE void store_group(int32x4_t operands, Group* group) {
  vst1_s16(group->number, vqmovn_s32(operands));
}

}  // namespace
