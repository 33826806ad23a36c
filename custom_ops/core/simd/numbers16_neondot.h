// Numbers of 16 bits, as two bytes each, beside the words of vec_int_neon.h.
#pragma once

#include <string.h>

#include "core/simd/vec_int_neon.h"

namespace {

constexpr int kMaxQueries = 4;   // query rows that share the looked up codes
// Sums of values that registers hold at a time; those of one slot may be more.
constexpr int kMostSums = 7;
constexpr int kDeepQueries = 0;  // query rows up to which values are taken by whole vectors

constexpr float kLargestNumber = 32512.0f;  // 127 * 256
constexpr float kLargestWeight = 32512.0f;
constexpr int kStepRows = tq::kBlock;  // weights that are rounded to the same steps

// Four numbers 256 * high + low.
struct Group {
  int8_t high[4];
  int8_t low[4];
};
using Codes = int8x16_t;
struct Factors {
  int8x16_t high, low;
};
struct Sums {
  int32x4_t high, low;
};
TQ_INLINE Table make_value_table(const int8_t* entries) { return make_key_table(entries); }
TQ_INLINE Codes lookup(Table table, Bytes index) { return bytes_of(table, index); }
TQ_INLINE Sums zero_sums() { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }
TQ_INLINE Sums first_value_sums(int32_t) { return zero_sums(); }
TQ_INLINE Factors load_factors(const void* p) {
  return {vld1q_s8(static_cast<const int8_t*>(p)), vld1q_s8(static_cast<const int8_t*>(p) + 16)};
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
  return {vreinterpretq_s8_s32(vdupq_n_s32(high)), vreinterpretq_s8_s32(vdupq_n_s32(low))};
}
TQ_INLINE void add_products(Sums& sums, const Codes& codes, const Factors& by) {
  sums.high = vdotq_s32(sums.high, codes, by.high);
  sums.low = vdotq_s32(sums.low, codes, by.low);
}
TQ_INLINE void add_key_products(Sums& sums, const Codes& keys, const Factors& query) {
  add_products(sums, keys, query);
}
TQ_INLINE void add_value_products(Sums& sums, const Codes& values, const Factors& weights) {
  add_products(sums, values, weights);
}
TQ_INLINE Floats value_sums(const Sums& sums) {
  return vcvtq_f32_s32(vaddq_s32(vshlq_n_s32(sums.high, 8), sums.low));
}
// The sums of four tokens as floats times `step`.
template <int PACKED>
TQ_INLINE void store_scores(const Sums* sums, int32_t, float step, float* scores) {
  vst1q_f32(scores, vmulq_n_f32(value_sums(*sums), step));
}
TQ_INLINE void store_group(int32x4_t numbers, Group* group) {
  const int32x4_t low = vshrq_n_s32(vshlq_n_s32(numbers, 24), 24);
  const int32x4_t high = vshrq_n_s32(vsubq_s32(numbers, low), 8);
  vst1_s8(group->high, vmovn_s16(vcombine_s16(vmovn_s32(high), vmovn_s32(low))));
}

}  // namespace
