#include "core/attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/buffer.h"
#include "core/row_format.h"

namespace tq {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr int kTileRows = 64;        // query rows that share each decoded block in a prefill
constexpr int64_t kChunk = 512;      // keys per task in a decode step
constexpr int64_t kMaxChunks = 64;   // bounds the memory for partial results
constexpr int64_t kFlatRows = 8;     // query rows rotated or un-rotated together

int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// Keys that a query sees: [low, high).
struct Range {
  int64_t low, high;
};

class Attention {
 public:
  Attention(const Kernels& kernels, const AttentionCall& call)
      : kernels_(kernels),
        call_(call),
        key_(row_format(call.key.bits, call.head_size, kernels.lanes)),
        value_(row_format(call.value.bits, call.head_size, kernels.lanes)),
        group_(call.query_heads / call.heads),
        rows_(group_ * call.tokens) {
    fill_table(call.key.centroids, call.key.bits, key_table_);
    fill_table(call.value.centroids, call.value.bits, value_table_);
  }

  bool run(const Parallel& parallel) {
    if (call_.batch == 0 || rows_ == 0) return true;
    return rows_ <= kTileRows ? run_chunked(parallel) : run_tiled(parallel);
  }

 private:
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

  // ---- one set of query rows against one range of keys.
  struct Rows {
    int64_t b, n, first;
    int count;
    const float* query;  // [count, key_.padded], rotated and scaled
    float* sums;         // [count, value_.padded]
    float* max;          // [count]
    float* weight;       // [count], sum of the exponentials
  };

  std::size_t work_size(int rows) const {
    const std::size_t scores = static_cast<std::size_t>(rows) * kBlock + 3 * kBlock;
    if (rows <= kernels_.max_fused) return scores;
    return scores + static_cast<std::size_t>(kBlock) * std::max(key_.padded, value_.padded);
  }

  void attend(const Rows& rows, Range keys, float* work) const {
    std::fill_n(rows.sums, static_cast<std::size_t>(rows.count) * value_.padded, 0.0f);
    std::fill_n(rows.max, rows.count, kNone);
    std::fill_n(rows.weight, rows.count, 0.0f);
    const int64_t lane = (rows.b * call_.heads + rows.n) * call_.slots;
    for (int64_t at = keys.low; at < keys.high; at += kBlock) {
      const int count = static_cast<int>(std::min<int64_t>(kBlock, keys.high - at));
      block(rows, call_.key.rows + (lane + at) * key_.row_bytes,
            call_.value.rows + (lane + at) * value_.row_bytes, at, count, work);
    }
  }

  void block(const Rows& rows, const uint8_t* keys, const uint8_t* values, int64_t at, int count,
             float* work) const {
    float* const key_scales = work;
    float* const value_scales = key_scales + kBlock;
    float* const bias = value_scales + kBlock;
    float* const scores = bias + kBlock;
    float* const decoded = scores + static_cast<std::size_t>(rows.count) * kBlock;
    const bool fused = rows.count <= kernels_.max_fused;
    kernels_.row_scales(key_, keys, count, key_scales);
    kernels_.row_scales(value_, values, count, value_scales);
    if (fused) {
      kernels_.score_rows(key_, keys, count, key_table_, rows.query, rows.count, scores);
    } else {
      kernels_.decode_columns(key_, keys, count, key_table_, decoded);
      kernels_.multiply(rows.query, key_.padded, decoded, kBlock, scores, kBlock, rows.count,
                        round_up(count, kernels_.lanes), key_.padded, false);
    }
    for (int r = 0; r < rows.count; ++r) {
      soften(rows, r, at, count, key_scales, value_scales, bias, scores + r * kBlock);
    }
    if (fused) {
      kernels_.accumulate_rows(value_, values, count, value_table_, scores, rows.count, rows.sums);
    } else {
      kernels_.decode_rows(value_, values, count, value_table_, decoded);
      kernels_.multiply(scores, kBlock, decoded, value_.padded, rows.sums, value_.padded,
                        rows.count, value_.padded, count, true);
    }
  }

  // One step of the online softmax for one query row.
  void soften(const Rows& rows, int r, int64_t at, int count, const float* key_scales,
              const float* value_scales, float* bias, float* scores) const {
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
        kernels_.weigh(scores, value_scales, count, rows.max[r] == kNone ? 0.0f : rows.max[r]);
  }

  const float* load_bias(const Rows& rows, int r, int64_t at, int count, float* bias) const {
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

  // ---- queries in, results out.
  // `natural` and `rotated` are scratch of [count, head_size] each.
  void prepare(const int64_t* flat_rows, int count, float* natural, float* rotated,
               float* const* out) const {
    const int size = call_.head_size;
    for (int r = 0; r < count; ++r) {
      load_floats(kernels_, call_.element, call_.query,
                  static_cast<std::size_t>(flat_rows[r]) * size, natural + r * size,
                  static_cast<std::size_t>(size));
    }
    kernels_.rotate(natural, call_.key_rotation, rotated, count, size);
    kernels_.scale(rotated, call_.scale, count * size);
    for (int r = 0; r < count; ++r) to_slot_order(key_, rotated + r * size, out[r]);
  }

  void finish(const int64_t* flat_rows, int count, const float* const* sums, const float* weight,
              float* natural, float* unrotated) const {
    const int size = call_.head_size;
    for (int r = 0; r < count; ++r) {
      float* const x = natural + r * size;
      to_natural_order(value_, sums[r], x);
      if (weight[r] == 0.0f) {  // every key is hidden
        std::fill_n(x, size, 0.0f);
      } else {
        kernels_.divide(x, weight[r], x, size);
      }
    }
    kernels_.rotate(natural, call_.value_rotation_transposed, unrotated, count, size);
    for (int r = 0; r < count; ++r) {
      store_floats(kernels_, call_.element, unrotated + r * size, call_.output,
                   static_cast<std::size_t>(flat_rows[r]) * size, static_cast<std::size_t>(size));
    }
  }

  bool run_tiled(const Parallel& parallel) const;
  bool run_chunked(const Parallel& parallel) const;

  const Kernels& kernels_;
  const AttentionCall& call_;
  const RowFormat key_, value_;
  const int64_t group_;
  const int64_t rows_;  // query rows per KV head
  float key_table_[kTable], value_table_[kTable];
};

// Prefill: a task is one tile of query rows of one KV head against all the keys it sees.
bool Attention::run_tiled(const Parallel& parallel) const {
  const int64_t tiles = (rows_ + kTileRows - 1) / kTileRows;
  const std::size_t natural = static_cast<std::size_t>(kTileRows) * call_.head_size;
  const std::size_t query = static_cast<std::size_t>(kTileRows) * key_.padded;
  const std::size_t sums = static_cast<std::size_t>(kTileRows) * value_.padded;
  std::atomic<bool> complete{true};
  auto task = [&](std::size_t index) {
    const int64_t tile = static_cast<int64_t>(index) % tiles;
    const int64_t lane = static_cast<int64_t>(index) / tiles;
    FloatBuffer buffer(2 * natural + query + sums + work_size(kTileRows));
    if (buffer.get() == nullptr) {
      complete = false;
      return;
    }
    float* const natural_at = buffer.get();
    float* const query_at = natural_at + 2 * natural;
    float* const sums_at = query_at + query;
    float max[kTileRows], weight[kTileRows];
    int64_t flat_rows[kTileRows];
    float* pointers[kTileRows];
    Rows rows{lane / call_.heads,
              lane % call_.heads,
              tile * kTileRows,
              static_cast<int>(std::min<int64_t>(kTileRows, rows_ - tile * kTileRows)),
              query_at,
              sums_at,
              max,
              weight};
    for (int r = 0; r < rows.count; ++r) {
      flat_rows[r] = flat(rows.b, rows.n, rows.first + r);
      pointers[r] = query_at + static_cast<std::size_t>(r) * key_.padded;
    }
    prepare(flat_rows, rows.count, natural_at, natural_at + natural, pointers);
    attend(rows, visible(rows.b, rows.first, rows.first + rows.count - 1), sums_at + sums);
    for (int r = 0; r < rows.count; ++r) {
      pointers[r] = sums_at + static_cast<std::size_t>(r) * value_.padded;
    }
    finish(flat_rows, rows.count, pointers, weight, natural_at, natural_at + natural);
  };
  parallel(static_cast<std::size_t>(call_.batch * call_.heads * tiles), task);
  return complete;
}

// Decode: few query rows, so the keys are split too and partial results are merged in key order.
bool Attention::run_chunked(const Parallel& parallel) const {
  const int64_t lanes = call_.batch * call_.heads;
  const int count = static_cast<int>(rows_);
  Range all = visible(0, 0, rows_ - 1);
  for (int64_t b = 1; b < call_.batch; ++b) {
    const Range range = visible(b, 0, rows_ - 1);
    all = {std::min(all.low, range.low), std::max(all.high, range.high)};
  }
  const int64_t factor = (all.high - all.low) / (kChunk * kMaxChunks) + 1;
  const int64_t chunk = kChunk * factor;
  const int64_t first_chunk = all.low / chunk;
  const int64_t chunks = std::max<int64_t>(1, (all.high + chunk - 1) / chunk - first_chunk);

  const std::size_t query_row = static_cast<std::size_t>(key_.padded);
  const std::size_t sums_row = static_cast<std::size_t>(value_.padded);
  const std::size_t partials = static_cast<std::size_t>(lanes * chunks) * count;
  FloatBuffer query(static_cast<std::size_t>(lanes) * count * query_row);
  FloatBuffer sums(partials * sums_row);
  FloatBuffer extremes(2 * partials);
  if (query.get() == nullptr || sums.get() == nullptr || extremes.get() == nullptr) return false;
  float* const max = extremes.get();
  float* const weight = max + partials;
  std::atomic<bool> complete{true};

  const int64_t flat_count = lanes * count;
  const std::size_t flat_tasks = static_cast<std::size_t>((flat_count + kFlatRows - 1) / kFlatRows);
  const std::size_t natural = static_cast<std::size_t>(kFlatRows) * call_.head_size;
  // Flat query row -> (b * N + n) * count + row.
  auto lane_row = [&](int64_t flat_row) {
    const int64_t t = flat_row % call_.tokens;
    const int64_t head = flat_row / call_.tokens;  // b * H + h; H = N * group
    return head / group_ * count + t * group_ + head % group_;
  };

  auto rotate = [&](std::size_t index) {
    alignas(64) float scratch[2 * kFlatRows * spec::kMaxHeadSize];
    int64_t flat_rows[kFlatRows];
    float* out[kFlatRows];
    const int64_t first = static_cast<int64_t>(index) * kFlatRows;
    const int some = static_cast<int>(std::min(kFlatRows, flat_count - first));
    for (int r = 0; r < some; ++r) {
      flat_rows[r] = first + r;
      out[r] = query.get() + static_cast<std::size_t>(lane_row(first + r)) * query_row;
    }
    prepare(flat_rows, some, scratch, scratch + natural, out);
  };
  parallel(flat_tasks, rotate);

  auto attend_chunk = [&](std::size_t index) {
    const int64_t lane = static_cast<int64_t>(index) / chunks;
    const int64_t at = (first_chunk + static_cast<int64_t>(index) % chunks) * chunk;
    const std::size_t partial = index * static_cast<std::size_t>(count);
    FloatBuffer work(work_size(count));
    if (work.get() == nullptr) {
      complete = false;
      return;
    }
    Rows rows{lane / call_.heads,
              lane % call_.heads,
              0,
              count,
              query.get() + static_cast<std::size_t>(lane) * count * query_row,
              sums.get() + partial * sums_row,
              max + partial,
              weight + partial};
    const Range range = visible(rows.b, 0, rows_ - 1);
    attend(rows, {std::max(range.low, at), std::min(range.high, at + chunk)}, work.get());
  };
  parallel(static_cast<std::size_t>(lanes * chunks), attend_chunk);
  if (!complete) return false;

  auto merge = [&](std::size_t index) {
    alignas(64) float scratch[2 * kFlatRows * spec::kMaxHeadSize];
    int64_t flat_rows[kFlatRows];
    float* merged[kFlatRows];
    float total[kFlatRows];
    const int64_t first = static_cast<int64_t>(index) * kFlatRows;
    const int some = static_cast<int>(std::min(kFlatRows, flat_count - first));
    for (int r = 0; r < some; ++r) {
      flat_rows[r] = first + r;
      const int64_t row = lane_row(first + r);
      const std::size_t begin =
          static_cast<std::size_t>(row / count * chunks * count + row % count);
      float factors[kMaxChunks + 2];
      float top = kNone;
      for (int64_t c = 0; c < chunks; ++c) top = std::max(top, max[begin + c * count]);
      if (top == kNone) top = 0.0f;
      total[r] = 0.0f;
      for (int64_t c = 0; c < chunks; ++c) {
        factors[c] = std::exp(max[begin + c * count] - top);
        total[r] += factors[c] * weight[begin + c * count];
      }
      // In place: the first chunk's sums become the row's sums.
      merged[r] = sums.get() + begin * sums_row;
      kernels_.scale(merged[r], factors[0], static_cast<int>(sums_row));
      if (chunks > 1) {
        kernels_.multiply(factors + 1, 0, merged[r] + count * sums_row,
                          static_cast<int>(count * sums_row), merged[r], 0, 1,
                          static_cast<int>(sums_row), static_cast<int>(chunks - 1), true);
      }
    }
    finish(flat_rows, some, merged, total, scratch, scratch + natural);
  };
  parallel(flat_tasks, merge);
  return true;
}

}  // namespace

bool attention(const Kernels& kernels, const AttentionCall& call, const Parallel& parallel) {
  return Attention(kernels, call).run(parallel);
}

void transpose(const float* rotation, int head_size, float* out) {
  for (int i = 0; i < head_size; ++i) {
    for (int j = 0; j < head_size; ++j) out[j * head_size + i] = rotation[i * head_size + j];
  }
}

}  // namespace tq
