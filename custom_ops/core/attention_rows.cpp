// One set of query rows: rotation, online softmax over blocks of keys, un-rotation. The contract is
// in attention_rows.h.
#include "core/attention_rows.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/raw_rows.h"

namespace tq {
namespace {

int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

RowFormat format_of(const CacheView& cache, const AttentionCall& call, int lanes) {
  if (!cache.raw) return row_format(cache.bits, call.head_size, lanes);
  return raw_row_format(cache.bits / 8, call.head_size, lanes);
}

}  // namespace

AttentionRows::AttentionRows(const Kernels& kernels, const AttentionCall& call)
    : kernels_(kernels),
      call_(call),
      key_(format_of(call.key, call, kernels.lanes)),
      value_(format_of(call.value, call, kernels.lanes)),
      group_(call.query_heads / call.heads),
      rows_(group_ * call.tokens) {
  if (!call.key.raw) fill_table(call.key.centroids, call.key.bits, key_table_);
  if (!call.value.raw) fill_table(call.value.centroids, call.value.bits, value_table_);
}

void AttentionRows::attend(const Rows& rows, Range keys, bool counts_sink, float* work) const {
  std::fill_n(rows.sums, static_cast<std::size_t>(rows.count) * value_.padded, 0.0f);
  std::fill_n(rows.max, rows.count, kNoMaximum);
  std::fill_n(rows.weight, rows.count, 0.0f);
  if (counts_sink && call_.sink != nullptr) start_from_sinks(rows);
  const int64_t lane = (rows.b * call_.heads + rows.n) * call_.slots;
  for (int64_t at = keys.low; at < keys.high; at += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, keys.high - at));
    block(rows, call_.key.rows + (lane + at) * key_.row_bytes,
          call_.value.rows + (lane + at) * value_.row_bytes, at, count, work);
  }
}

// A sink is a key without a value that every query sees: exp(sink - max) with max = sink.
void AttentionRows::start_from_sinks(const Rows& rows) const {
  for (int r = 0; r < rows.count; ++r) {
    load_floats(kernels_, call_.element, call_.sink,
                static_cast<std::size_t>(query_head(rows.n, rows.first + r)), rows.max + r, 1);
    rows.weight[r] = rows.max[r] == kNoMaximum ? 0.0f : 1.0f;
  }
}

void AttentionRows::block(const Rows& rows, const uint8_t* keys, const uint8_t* values, int64_t at,
                          int count, float* work) const {
  float* const key_scales = work;
  float* const value_scales = key_scales + kBlock;
  float* const bias = value_scales + kBlock;
  float* const scores = bias + kBlock;
  float* const decoded = scores + static_cast<std::size_t>(rows.count) * kBlock;
  score(rows, keys, count, key_scales, decoded, scores);
  if (call_.value.raw) {
    std::fill_n(value_scales, kBlock, 1.0f);
  } else {
    kernels_.row_scales(value_, values, count, value_scales);
  }
  for (int r = 0; r < rows.count; ++r) {
    soften(rows, r, at, count, key_scales, value_scales, bias, scores + r * kBlock);
  }
  accumulate(rows, values, count, scores, decoded);
}

void AttentionRows::score(const Rows& rows, const uint8_t* keys, int count, float* scales,
                          float* decoded, float* scores) const {
  if (call_.key.raw) {
    std::fill_n(scales, kBlock, 1.0f);
    decode_raw_columns(kernels_, key_, raw_element(call_.element, key_.bits), keys, count,
                       decoded);
  } else {
    kernels_.row_scales(key_, keys, count, scales);
    if (is_fused(rows.count, call_.key)) {
      kernels_.score_rows(key_, keys, count, key_table_, rows.query, rows.count, scores);
      return;
    }
    kernels_.decode_columns(key_, keys, count, key_table_, decoded);
  }
  kernels_.multiply(rows.query, key_.padded, decoded, kBlock, scores, kBlock, rows.count,
                    round_up(count, kernels_.lanes), key_.padded, false);
}

void AttentionRows::accumulate(const Rows& rows, const uint8_t* values, int count,
                               const float* weights, float* decoded) const {
  if (call_.value.raw) {
    decode_raw_rows(kernels_, value_, raw_element(call_.element, value_.bits), values, count,
                    decoded);
    accumulate_raw_rows(kernels_, value_, weights, rows.count, decoded, count, rows.sums);
  } else if (is_fused(rows.count, call_.value)) {
    kernels_.accumulate_rows(value_, values, count, value_table_, weights, rows.count, rows.sums);
  } else {
    kernels_.decode_rows(value_, values, count, value_table_, decoded);
    kernels_.multiply(weights, kBlock, decoded, value_.padded, rows.sums, value_.padded,
                      rows.count, value_.padded, count, true);
  }
}

// One step of the online softmax for one query row.
void AttentionRows::soften(const Rows& rows, int r, int64_t at, int count,
                           const float* key_scales, const float* value_scales, float* bias,
                           float* scores) const {
  const Range range = visible(rows.b, rows.first + r);
  const int low = static_cast<int>(std::clamp<int64_t>(range.low - at, 0, count));
  const int high = static_cast<int>(std::clamp<int64_t>(range.high - at, 0, count));
  const float* const row_bias =
      call_.bias == nullptr ? nullptr : load_bias(rows, r, at, count, bias);
  const float max = kernels_.finish_scores(scores, key_scales, row_bias,
                                           hiding_bias(call_.element), call_.softcap, count, low,
                                           high);
  if (max > rows.max[r]) {
    const float factor = std::exp(rows.max[r] - max);
    rows.weight[r] *= factor;
    kernels_.scale(rows.sums + static_cast<std::size_t>(r) * value_.padded, factor,
                   value_.padded);
    rows.max[r] = max;
  }
  // While every key so far is hidden, any finite maximum gives weights of zero.
  rows.weight[r] +=
      kernels_.weigh(scores, value_scales, count, rows.max[r] == kNoMaximum ? 0.0f : rows.max[r]);
}

const float* AttentionRows::load_bias(const Rows& rows, int r, int64_t at, int count,
                                      float* bias) const {
  const int64_t row = rows.first + r;
  const int64_t* const stride = call_.bias_stride;
  const int64_t offset = rows.b * stride[0] + query_head(rows.n, row) * stride[1] +
                         token(row) * stride[2] + at * stride[3];
  const int loaded = stride[3] == 0 ? 1 : count;
  load_floats(kernels_, call_.element, call_.bias, static_cast<std::size_t>(offset), bias,
              static_cast<std::size_t>(loaded));
  if (loaded == 1) std::fill_n(bias, kBlock, bias[0]);
  return bias;
}

void AttentionRows::prepare(const int64_t* flat_rows, int count, float* natural,
                            float* rotated, float* const* out) const {
  const int size = call_.head_size;
  for (int r = 0; r < count; ++r) {
    load_floats(kernels_, call_.element, call_.query,
                static_cast<std::size_t>(flat_rows[r]) * size, natural + r * size,
                static_cast<std::size_t>(size));
  }
  if (call_.key.raw) {
    std::copy_n(natural, count * size, rotated);
  } else {
    kernels_.rotate(natural, call_.key_rotation, rotated, count, size);
  }
  kernels_.scale(rotated, call_.scale, count * size);
  for (int r = 0; r < count; ++r) to_slot_order(key_, rotated + r * size, out[r]);
}

void AttentionRows::finish(const int64_t* flat_rows, int count, const float* const* sums,
                           const float* weight, float* natural, float* unrotated) const {
  const int size = call_.head_size;
  for (int r = 0; r < count; ++r) {
    float* const x = natural + r * size;
    to_natural_order(value_, sums[r], x);
    if (weight[r] == 0.0f) {  // every key is hidden, and there is no sink
      std::fill_n(x, size, 0.0f);
    } else {
      kernels_.divide(x, weight[r], x, size);
    }
  }
  if (call_.value.raw) {
    unrotated = natural;
  } else {
    kernels_.rotate(natural, call_.value_rotation_transposed, unrotated, count, size);
  }
  for (int r = 0; r < count; ++r) {
    store_floats(kernels_, call_.element, unrotated + r * size, call_.output,
                 static_cast<std::size_t>(flat_rows[r]) * size, static_cast<std::size_t>(size));
  }
}

}  // namespace tq
