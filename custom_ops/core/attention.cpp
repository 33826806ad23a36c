// How the attention is cut into tasks; the contract is in attention.h, a task in attention_rows.h.
//
// The cut depends on the shapes and lengths, never on the threads. Where keys are split, chunk c has
// maximum m_c, weight w_c and sums s_c; with m the largest m_c a row is
//   (sum of exp(m_c - m) s_c) / (sum of exp(m_c - m) w_c),  both added over rising c.
// A sink counts in chunk 0 alone.
#include "core/attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "core/attention_rows.h"
#include "core/buffer.h"

namespace tq {
namespace {

constexpr int kTileRows = 64;       // query rows that share each decoded block in a prefill
constexpr int64_t kChunk = 512;     // keys per task in a decode step
constexpr int64_t kMaxChunks = 64;  // bounds the memory for partial results
constexpr int64_t kFlatRows = 8;    // query rows rotated or un-rotated together

// Prefill: a task is one tile of query rows of one KV head against all the keys it sees.
bool run_tiled(const AttentionCall& call, const AttentionRows& worker, const Parallel& parallel) {
  const int64_t tiles = (worker.rows() + kTileRows - 1) / kTileRows;
  const std::size_t scratch = kTileRows * worker.scratch_width();
  const std::size_t query = kTileRows * worker.query_width();
  const std::size_t sums = kTileRows * worker.sums_width();
  const std::size_t shifts = kTileRows * worker.shift_width();
  const std::size_t buckets = kTileRows * worker.bucket_width();
  std::atomic<bool> complete{true};
  auto task = [&](std::size_t index) {
    const int64_t tile = static_cast<int64_t>(index) % tiles;
    const int64_t lane = static_cast<int64_t>(index) / tiles;
    FloatBuffer buffer(scratch + query + sums + shifts + buckets + worker.work_size(kTileRows));
    if (buffer.get() == nullptr) {
      complete = false;
      return;
    }
    float* const scratch_at = buffer.get();
    float* const query_at = scratch_at + scratch;
    float* const sums_at = query_at + query;
    float* const shifts_at = sums_at + sums;
    float* const buckets_at = shifts_at + shifts;
    float max[kTileRows], weight[kTileRows];
    int64_t flat_rows[kTileRows];
    float *wide[kTileRows], *narrow[kTileRows];
    const int64_t first = tile * kTileRows;
    const int count = static_cast<int>(std::min<int64_t>(kTileRows, worker.rows() - first));
    const AttentionRows::Rows rows{lane / call.heads, lane % call.heads, first,   count, query_at,
                                   shifts_at,         sums_at,           buckets_at, max,   weight};
    for (int r = 0; r < rows.count; ++r) {
      flat_rows[r] = worker.flat(rows.b, rows.n, rows.first + r);
      wide[r] = query_at + static_cast<std::size_t>(r) * worker.query_width();
      narrow[r] = shifts_at + static_cast<std::size_t>(r) * worker.shift_width();
    }
    worker.prepare(flat_rows, rows.count, scratch_at, wide, narrow);
    worker.attend(rows, worker.visible(rows.b, first, first + count - 1), true,
                  buckets_at + buckets);
    for (int r = 0; r < rows.count; ++r) {
      wide[r] = sums_at + static_cast<std::size_t>(r) * worker.sums_width();
      narrow[r] = buckets_at + static_cast<std::size_t>(r) * worker.bucket_width();
    }
    worker.finish(flat_rows, rows.count, wide, narrow, weight, scratch_at);
  };
  parallel(static_cast<std::size_t>(call.batch * call.heads * tiles), task);
  return complete;
}

// Decode: few query rows, so the keys are split too and partial results are merged in key order.
bool run_chunked(const Kernels& kernels, const AttentionCall& call, const AttentionRows& worker,
                 const Parallel& parallel) {
  const int64_t lanes = call.batch * call.heads;
  const int count = static_cast<int>(worker.rows());
  Range all = worker.visible(0, 0, worker.rows() - 1);
  for (int64_t b = 1; b < call.batch; ++b) {
    const Range range = worker.visible(b, 0, worker.rows() - 1);
    all = {std::min(all.low, range.low), std::max(all.high, range.high)};
  }
  const int64_t factor = (all.high - all.low) / (kChunk * kMaxChunks) + 1;
  const int64_t chunk = kChunk * factor;
  const int64_t first_chunk = all.low / chunk;
  const int64_t chunks = std::max<int64_t>(1, (all.high + chunk - 1) / chunk - first_chunk);

  const std::size_t query_row = static_cast<std::size_t>(worker.query_width());
  const std::size_t sums_row = static_cast<std::size_t>(worker.sums_width());
  const std::size_t partials = static_cast<std::size_t>(lanes * chunks) * count;
  FloatBuffer query(static_cast<std::size_t>(lanes) * count * query_row);
  FloatBuffer sums(partials * sums_row);
  const std::size_t shift_row = worker.shift_width(), bucket_row = worker.bucket_width();
  FloatBuffer shifts(static_cast<std::size_t>(lanes) * count * shift_row);
  FloatBuffer extremes((2 + bucket_row) * partials);
  if (query.get() == nullptr || sums.get() == nullptr || shifts.get() == nullptr ||
      extremes.get() == nullptr) {
    return false;
  }
  float* const max = extremes.get();
  float* const weight = max + partials;
  float* const buckets = weight + partials;
  std::atomic<bool> complete{true};

  const int64_t flat_count = lanes * count;
  const std::size_t flat_tasks = static_cast<std::size_t>((flat_count + kFlatRows - 1) / kFlatRows);
  const std::size_t scratch = kFlatRows * worker.scratch_width();
  // Flat query row -> (b * N + n) * count + row.
  auto lane_row = [&](int64_t flat_row) {
    const int64_t t = flat_row % call.tokens;
    const int64_t head = flat_row / call.tokens;  // b * H + h; H = N * group
    return head / worker.group() * count + t * worker.group() + head % worker.group();
  };

  auto rotate_some = [&](std::size_t index) {
    FloatBuffer buffer(scratch);
    if (buffer.get() == nullptr) {
      complete = false;
      return;
    }
    int64_t flat_rows[kFlatRows];
    float *out[kFlatRows], *shifts_out[kFlatRows];
    const int64_t first = static_cast<int64_t>(index) * kFlatRows;
    const int some = static_cast<int>(std::min(kFlatRows, flat_count - first));
    for (int r = 0; r < some; ++r) {
      flat_rows[r] = first + r;
      const std::size_t row = static_cast<std::size_t>(lane_row(first + r));
      out[r] = query.get() + row * query_row;
      shifts_out[r] = shifts.get() + row * shift_row;
    }
    worker.prepare(flat_rows, some, buffer.get(), out, shifts_out);
  };
  parallel(flat_tasks, rotate_some);
  if (!complete) return false;

  auto attend_chunk = [&](std::size_t index) {
    const int64_t lane = static_cast<int64_t>(index) / chunks;
    const int64_t c = static_cast<int64_t>(index) % chunks;
    const int64_t at = (first_chunk + c) * chunk;
    const std::size_t partial = index * static_cast<std::size_t>(count);
    FloatBuffer work(worker.work_size(count));
    if (work.get() == nullptr) {
      complete = false;
      return;
    }
    const AttentionRows::Rows rows{
        lane / call.heads,
        lane % call.heads,
        0,
        count,
        query.get() + static_cast<std::size_t>(lane) * count * query_row,
        shifts.get() + static_cast<std::size_t>(lane) * count * shift_row,
        sums.get() + partial * sums_row,
        buckets + partial * bucket_row,
        max + partial,
        weight + partial};
    const Range range = worker.visible(rows.b, 0, worker.rows() - 1);
    worker.attend(rows, {std::max(range.low, at), std::min(range.high, at + chunk)}, c == 0,
                  work.get());
  };
  parallel(static_cast<std::size_t>(lanes * chunks), attend_chunk);
  if (!complete) return false;

  auto merge = [&](std::size_t index) {
    FloatBuffer buffer(scratch);
    if (buffer.get() == nullptr) {
      complete = false;
      return;
    }
    int64_t flat_rows[kFlatRows];
    float *merged[kFlatRows], *merged_buckets[kFlatRows];
    float total[kFlatRows];
    const int64_t first = static_cast<int64_t>(index) * kFlatRows;
    const int some = static_cast<int>(std::min(kFlatRows, flat_count - first));
    for (int r = 0; r < some; ++r) {
      flat_rows[r] = first + r;
      const int64_t row = lane_row(first + r);
      const std::size_t begin =
          static_cast<std::size_t>(row / count * chunks * count + row % count);
      float factors[kMaxChunks + 2];
      float top = kNoMaximum;
      for (int64_t c = 0; c < chunks; ++c) top = std::max(top, max[begin + c * count]);
      if (top == kNoMaximum) top = 0.0f;
      total[r] = 0.0f;
      for (int64_t c = 0; c < chunks; ++c) {
        factors[c] = std::exp(max[begin + c * count] - top);
        total[r] += factors[c] * weight[begin + c * count];
      }
      // In place: the first chunk's sums become the row's sums.
      merged[r] = sums.get() + begin * sums_row;
      kernels.scale(merged[r], factors[0], static_cast<int>(sums_row));
      if (chunks > 1) {
        kernels.multiply(factors + 1, 0, merged[r] + count * sums_row,
                         static_cast<int>(count * sums_row), merged[r], 0, 1,
                         static_cast<int>(sums_row), static_cast<int>(chunks - 1), true);
      }
      merged_buckets[r] = buckets + begin * bucket_row;
      for (std::size_t p = 0; p < bucket_row; ++p) {
        float sum = 0.0f;
        for (int64_t c = 0; c < chunks; ++c) {
          const std::size_t partial = begin + static_cast<std::size_t>(c * count);
          sum += factors[c] * buckets[partial * bucket_row + p];
        }
        merged_buckets[r][p] = sum;
      }
    }
    worker.finish(flat_rows, some, merged, merged_buckets, total, buffer.get());
  };
  parallel(flat_tasks, merge);
  return complete;
}

}  // namespace

bool attention(const Kernels& kernels, const AttentionCall& call, const Parallel& parallel) {
  if (call.batch == 0 || call.query_heads == 0 || call.tokens == 0) return true;
  const AttentionRows worker(kernels, call);
  return worker.rows() <= kTileRows ? run_chunked(kernels, call, worker, parallel)
                                    : run_tiled(call, worker, parallel);
}

}  // namespace tq
