// The work of one attention task: query rows of one KV head, and blocks of its keys.
#pragma once

#include <cstdint>

#include "core/attention_call.h"
#include "core/kernels.h"

namespace tq {

// Rows of the caches of KV head n of sequence b, from that of token `first` on.
struct RowRun {
  int64_t b, n, first, count;
};

// Rows that lie together, up to a block of them; none where they are null.
struct RowSpan {
  const uint8_t* rows;
  int count;
};

// Query rows first .. first + count of KV head n of sequence b, and where results go. Widths are those
// of AttentionRows.
struct HeadTask {
  int64_t b, n, first;
  int count;
  ResidentTokens resident;
  const float* query;   // [count, query_width], rotated and scaled, as the keys want it
  const float* shifts;  // [count, shift_width]
  float* sums;          // [count, sums_width], as the values want them
  float* buckets;       // [count, bucket_width], weights by row of the offset
  float* max;           // [count]
  float* weight;        // [count], sum of the exponentials
  int64_t end;          // of the keys that the head reads, in whatever ranges
  RowRun next;          // what is read after them; its first rows are prefetched
};

// Keys at .. at + count, and what their rows say; arrays of kBlock.
struct KeyBlock {
  static constexpr int kArrays = 6 + kMaxParts;

  int64_t at;
  int count;
  float *key_scales, *key_zeros, *value_zeros, *ones, *shift, *bias;
  float* value_scales;  // of each part of the rows

  // Takes its arrays from `work`.
  static KeyBlock in(float*& work) {
    KeyBlock block{};
    for (float** const array : {&block.key_scales, &block.key_zeros, &block.value_zeros,
                                &block.ones, &block.shift, &block.bias, &block.value_scales}) {
      *array = work;
      work += array == &block.value_scales ? kMaxParts * kBlock : kBlock;
    }
    return block;
  }
};

}  // namespace tq
