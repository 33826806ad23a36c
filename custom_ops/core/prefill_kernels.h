// The arguments of prefill kernels; part of core/kernels.h, whose rules apply here, too.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace tq {

struct RowFormat;
struct IntegerTable;

// Keys and values, decoded without their scales; of up to kPrefillBlock tokens. Widths are
// multiples of the lanes. What lies beyond the tokens is not looked at, but for the keys up to a
// multiple of the lanes.
struct PrefillBlock {
  const float* keys;    // [kPrefillBlock / kBlock][key_width][kBlock]
  const float* values;  // [tokens][value_width]
  const float *key_scales, *value_scales;  // [kPrefillBlock]
  int key_width, value_width;
};

// c[m][n] (+)= steps[m] * a[m][k] b[k][n], where a word holds two 16-bit numbers whose products are
// added; n is a multiple of the lanes.
using MultiplyPairs = void (*)(const int32_t* a, int lda, const int32_t* b, int ldb, float* c,
                               int ldc, int m, int n, int k, const float* steps, bool accumulate);

// The same in words: the coordinates that two neighbouring slots have at one place, or one
// coordinate of two neighbouring tokens. Centroids are integers, the scales are times what one
// stands for.
struct PairBlock {
  const int32_t* keys;    // [kPrefillBlock / kBlock][key_pairs][kBlock]
  const int32_t* values;  // [tokens / 2][value_width], zero beyond the last token
  const float *key_scales, *value_scales;  // [kPrefillBlock]
  int key_pairs, value_width;
  MultiplyPairs multiply;
};

constexpr float kLargestPairNumber = 32767.0f;

// For codes of at most 16 levels in more than one slot. Queries and weights are rounded to 32767
// steps of the largest of their row, or of their row and block: exact to some 3e-5 of the result.
struct PairKernels {
  void (*decode_columns)(const RowFormat& format, const uint8_t* rows, int count,
                         const IntegerTable& table, int32_t* keys);
  void (*decode_rows)(const RowFormat& format, const uint8_t* rows, int count,
                      const IntegerTable& table, int32_t* values);
  // A query row in slot order to padded / 2 words; returns what one stands for, which is not a
  // number where the row is not finite.
  float (*pack_query)(const RowFormat& format, const float* query, int32_t* words);
  // As Kernels::attend_block, for packed queries of these steps.
  void (*attend_block)(const PairBlock& block, const int32_t* query, const float* steps, int rows,
                       const int* low, const int* high, float* max, float* weight, float* sums);
};

}  // namespace tq
