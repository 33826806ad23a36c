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
  const std::size_t natural = static_cast<std::size_t>(kTileRows) * call.head_size;
  const std::size_t query = static_cast<std::size_t>(kTileRows) * worker.query_width();
  const std::size_t sums = static_cast<std::size_t>(kTileRows) * worker.sums_width();
  std::atomic<bool> complete{true};
  auto task = [&](std::size_t index) {
    const int64_t tile = static_cast<int64_t>(index) % tiles;
    const int64_t lane = static_cast<int64_t>(index) / tiles;
    FloatBuffer buffer(2 * natural + query + sums + worker.work_size(kTileRows));
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
    const int64_t first = tile * kTileRows;
    const int count = static_cast<int>(std::min<int64_t>(kTileRows, worker.rows() - first));
    const AttentionRows::Rows rows{
        lane / call.heads, lane % call.heads, first, count, query_at, sums_at, max, weight};
    for (int r = 0; r < rows.count; ++r) {
      flat_rows[r] = worker.flat(rows.b, rows.n, rows.first + r);
      pointers[r] = query_at + static_cast<std::size_t>(r) * worker.query_width();
    }
    worker.prepare(flat_rows, rows.count, natural_at, natural_at + natural, pointers);
    worker.attend(rows, worker.visible(rows.b, first, first + count - 1), true, sums_at + sums);
    for (int r = 0; r < rows.count; ++r) {
      pointers[r] = sums_at + static_cast<std::size_t>(r) * worker.sums_width();
    }
    worker.finish(flat_rows, rows.count, pointers, weight, natural_at, natural_at + natural);
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
  FloatBuffer extremes(2 * partials);
  if (query.get() == nullptr || sums.get() == nullptr || extremes.get() == nullptr) return false;
  float* const max = extremes.get();
  float* const weight = max + partials;
  std::atomic<bool> complete{true};

  const int64_t flat_count = lanes * count;
  const std::size_t flat_tasks = static_cast<std::size_t>((flat_count + kFlatRows - 1) / kFlatRows);
  const std::size_t natural = static_cast<std::size_t>(kFlatRows) * call.head_size;
  // Flat query row -> (b * N + n) * count + row.
  auto lane_row = [&](int64_t flat_row) {
    const int64_t t = flat_row % call.tokens;
    const int64_t head = flat_row / call.tokens;  // b * H + h; H = N * group
    return head / worker.group() * count + t * worker.group() + head % worker.group();
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
    worker.prepare(flat_rows, some, scratch, scratch + natural, out);
  };
  parallel(flat_tasks, rotate);

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
        sums.get() + partial * sums_row,
        max + partial,
        weight + partial};
    const Range range = worker.visible(rows.b, 0, worker.rows() - 1);
    worker.attend(rows, {std::max(range.low, at), std::min(range.high, at + chunk)}, c == 0,
                  work.get());
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
    }
    worker.finish(flat_rows, some, merged, total, scratch, scratch + natural);
  };
  parallel(flat_tasks, merge);
  return true;
}

}  // namespace

bool attention(const Kernels& kernels, const AttentionCall& call, const Parallel& parallel) {
  if (call.batch == 0 || call.query_heads == 0 || call.tokens == 0) return true;
  const AttentionRows worker(kernels, call);
  return worker.rows() <= kTileRows ? run_chunked(kernels, call, worker, parallel)
                                    : run_tiled(call, worker, parallel);
}

void transpose(const float* rotation, int head_size, float* out) {
  for (int i = 0; i < head_size; ++i) {
    for (int j = 0; j < head_size; ++j) out[j * head_size + i] = rotation[i * head_size + j];
  }
}

}  // namespace tq
