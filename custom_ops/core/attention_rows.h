// What one task of the attention does: some query rows of one KV head against a range of keys.
//
// A row of KV head n is a pair (token t, head g of the group), t-major. Keys come in blocks of
// kBlock from the start of the range; for each block the online softmax rescales what a row has
// summed so far when its maximum rises, then adds the block's weights and weighted values. So a
// row's sums depend on where its range starts and ends, never on which rows share a task.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "core/attention.h"
#include "core/kernels.h"
#include "core/row_format.h"

namespace tq {

// Maximum of a row whose keys are all hidden so far.
inline constexpr float kNoMaximum = -std::numeric_limits<float>::infinity();

// Keys that a query sees: [low, high).
struct Range {
  int64_t low, high;
};

class AttentionRows {
 public:
  // The call outlives this object.
  AttentionRows(const Kernels& kernels, const AttentionCall& call);

  // ---- indices. A row of KV head n is a pair (token t, head g of the group), t-major.
  int64_t past(int64_t b) const { return call_.past_length[call_.length_per_batch ? b : 0]; }
  int64_t token(int64_t row) const { return row / group_; }
  int64_t query_head(int64_t n, int64_t row) const { return n * group_ + row % group_; }
  int64_t flat(int64_t b, int64_t n, int64_t row) const {
    return (b * call_.query_heads + query_head(n, row)) * call_.tokens + token(row);
  }

  Range visible(int64_t b, int64_t row) const {
    const int64_t position = past(b) + token(row);
    Range range{0, call_.causal ? position + 1 : past(b) + call_.tokens};
    if (call_.sliding_window > 0) {
      range.low = std::max<int64_t>(0, position - call_.sliding_window + 1);
    }
    return range;
  }

  // Both ends of `visible` rise with the token.
  Range visible(int64_t b, int64_t first, int64_t last) const {
    return {visible(b, first).low, visible(b, last).high};
  }

  int64_t rows() const { return rows_; }  // query rows per KV head
  int64_t group() const { return group_; }
  std::size_t query_width() const { return static_cast<std::size_t>(key_.padded); }
  std::size_t sums_width() const { return static_cast<std::size_t>(value_.padded); }

  // ---- query rows first .. first + count of KV head n of sequence b, and where results go.
  struct Rows {
    int64_t b, n, first;
    int count;
    const float* query;  // [count, query_width], rotated and scaled, slot order
    float* sums;         // [count, sums_width], slot order
    float* max;          // [count]
    float* weight;       // [count], sum of the exponentials
  };

  // `natural` and `rotated` are scratch of [count, head_size]; out[r] has query_width floats.
  void prepare(const int64_t* flat_rows, int count, float* natural, float* rotated,
               float* const* out) const;

  // Fills sums, max and weight; `work` has work_size(rows.count) floats. Of the ranges that a row's
  // keys are split into, one counts its sink.
  void attend(const Rows& rows, Range keys, bool counts_sink, float* work) const;
  std::size_t work_size(int rows) const {
    const std::size_t scores = static_cast<std::size_t>(rows) * kBlock + 3 * kBlock;
    if (is_fused(rows, call_.key) && is_fused(rows, call_.value)) return scores;
    return scores + static_cast<std::size_t>(kBlock) * std::max(key_.padded, value_.padded);
  }

  // Divides sums[r] by weight[r], un-rotates, writes the output; zeros where weight[r] is zero.
  void finish(const int64_t* flat_rows, int count, const float* const* sums, const float* weight,
              float* natural, float* unrotated) const;

 private:
  void block(const Rows& rows, const uint8_t* keys, const uint8_t* values, int64_t at, int count,
             float* work) const;
  void soften(const Rows& rows, int r, int64_t at, int count, const float* key_scales,
              const float* value_scales, float* bias, float* scores) const;
  void score(const Rows& rows, const uint8_t* keys, int count, float* scales, float* decoded,
             float* scores) const;
  void accumulate(const Rows& rows, const uint8_t* values, int count, const float* weights,
                  float* decoded) const;
  void start_from_sinks(const Rows& rows) const;
  const float* load_bias(const Rows& rows, int r, int64_t at, int count, float* bias) const;

  // Whether the cache is read without decoding a block to memory first.
  bool is_fused(int rows, const CacheView& cache) const {
    return rows <= kernels_.max_fused && !cache.raw;
  }

  const Kernels& kernels_;
  const AttentionCall& call_;
  const RowFormat key_, value_;
  const int64_t group_;
  const int64_t rows_;
  float key_table_[kTable], value_table_[kTable];
};

}  // namespace tq
