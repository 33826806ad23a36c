// How the attention is cut into tasks; the contract is in attention.h, a task in attention_rows.h.
//
// The cut depends on the shapes and lengths, never on the threads. Where keys are split, chunk c
// has maximum m_c, weight w_c and sums s_c; with m the largest m_c a row is
//   (sum of exp(m_c - m) s_c) / (sum of exp(m_c - m) w_c),  both added over rising c.
// A sink counts in chunk 0 alone.
#include "core/attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <new>

#include "core/attention_prefill.h"
#include "core/attention_rows.h"
#include "core/buffer.h"

namespace tq {
namespace {

constexpr int64_t kChunk = 512;     // keys per task in a decode step
constexpr int64_t kMaxChunks = 64;
constexpr int64_t kFlatRows = 8;  // query rows rotated or un-rotated together

// Query rows, and rows of partial results, that are kept at a time: these bound the memory.
constexpr int64_t kWaveRows = 256;
constexpr int64_t kPartialRows = 512;

// Keys of every sequence.
Range range_of(const AttentionCall& call, const AttentionRows& worker) {
  Range all = worker.visible(0, 0, worker.rows() - 1);
  for (int64_t b = 1; b < call.batch; ++b) {
    const Range range = worker.visible(b, 0, worker.rows() - 1);
    all = {std::min(all.low, range.low), std::max(all.high, range.high)};
  }
  return all;
}

// Decode: few query rows, so the keys are split too and partial results are merged in key order.
// Of the lanes (sequence, KV head) `lanes` from `first_lane` on.
bool run_wave(const Kernels& kernels, const AttentionCall& call, const AttentionRows& worker,
              Range all, int64_t first_lane, int64_t lanes, const Parallel& parallel) {
  const int count = static_cast<int>(worker.rows());
  const int64_t most = std::clamp<int64_t>(kPartialRows / (lanes * count), 1, kMaxChunks);
  const int64_t factor = (all.high - all.low) / (kChunk * most) + 1;
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
  const WindowRows& window = worker.window();
  const std::size_t exact_row = window.width();
  const std::size_t exact_rows = window.is_on() ? static_cast<std::size_t>(lanes) * count : 0;
  FloatBuffer exact(2 * exact_rows * (exact_row + 1));
  const std::size_t hand_count = window.is_on() ? static_cast<std::size_t>(lanes) : 0;
  const std::unique_ptr<AtHand[]> hands(new (std::nothrow) AtHand[hand_count]);
  if (hands == nullptr || exact.get() == nullptr || query.get() == nullptr ||
      sums.get() == nullptr || shifts.get() == nullptr || extremes.get() == nullptr) {
    return false;
  }
  float* const max = extremes.get();
  float* const weight = max + partials;
  float* const buckets = weight + partials;
  float* const exact_query = exact.get();
  float* const exact_sums = exact_query + exact_rows * exact_row;
  float* const exact_max = exact_sums + exact_rows * exact_row;
  float* const exact_weight = exact_max + exact_rows;
  std::atomic<bool> complete{true};

  const int64_t flat_first = first_lane * count, flat_count = lanes * count;
  const std::size_t flat_tasks = static_cast<std::size_t>((flat_count + kFlatRows - 1) / kFlatRows);
  const std::size_t scratch = kFlatRows * worker.scratch_width();
  // Flat query row -> (b * N + n - first_lane) * count + row.
  auto lane_row = [&](int64_t flat_row) {
    const int64_t t = flat_row % call.tokens;
    const int64_t head = flat_row / call.tokens;  // b * H + h; H = N * group
    return (head / worker.group() - first_lane) * count + t * worker.group() +
           head % worker.group();
  };

  auto rotate_some = [&](std::size_t index) {
    for (std::size_t lane = index; lane < hand_count; lane += flat_tasks) {
      const int64_t at = first_lane + static_cast<int64_t>(lane);
      hands[lane] = window.at_hand(at / call.heads, at % call.heads);
    }
    FloatBuffer buffer(scratch);
    if (buffer.get() == nullptr) {
      complete = false;
      return;
    }
    int64_t flat_rows[kFlatRows];
    float *out[kFlatRows], *shifts_out[kFlatRows], *exact_out[kFlatRows];
    const int64_t first = static_cast<int64_t>(index) * kFlatRows;
    const int some = static_cast<int>(std::min(kFlatRows, flat_count - first));
    for (int r = 0; r < some; ++r) {
      flat_rows[r] = flat_first + first + r;
      const std::size_t row = static_cast<std::size_t>(lane_row(flat_rows[r]));
      out[r] = query.get() + row * query_row;
      shifts_out[r] = shifts.get() + row * shift_row;
      exact_out[r] = exact_query + row * exact_row;
    }
    worker.prepare(flat_rows, some, buffer.get(), out, shifts_out, exact_out);
  };
  parallel(flat_tasks, rotate_some);
  if (!complete) return false;

  // A lane's first task is what its queries take exactly: the entries lie in front of the rows,
  // where the last rows of the lane before have already asked for memory. Where values are skipped,
  // their maxima have to be there before.
  const bool is_exact_first = window.is_on() && worker.skips(all.high);
  auto attend_exactly = [&](std::size_t index) {
    const int64_t lane = static_cast<int64_t>(index);
    FloatBuffer work(window.work_size(count));
    if (work.get() == nullptr) {
      complete = false;
      return;
    }
    const std::size_t row = index * static_cast<std::size_t>(count);
    window.attend({(first_lane + lane) / call.heads, (first_lane + lane) % call.heads, 0, count,
                   hands[index], exact_query + row * exact_row, exact_sums + row * exact_row,
                   exact_max + row, exact_weight + row},
                  work.get());
  };
  if (is_exact_first) parallel(static_cast<std::size_t>(lanes), attend_exactly);
  const int64_t exact_tasks = window.is_on() && !is_exact_first ? 1 : 0;
  const int64_t together = worker.heads_together();
  const auto hand_of = [&](int64_t lane) {
    return window.is_on() ? hands[static_cast<std::size_t>(lane)] : kNothingAtHand;
  };
  const auto rows_of = [&](int64_t lane, int64_t c) {
    const int64_t b = (first_lane + lane) / call.heads, n = (first_lane + lane) % call.heads;
    const std::size_t partial = static_cast<std::size_t>((lane * chunks + c) * count);
    AttentionRows::Run next{0, 0, 0, 0};
    if (lane + together < lanes) {
      const int64_t after = first_lane + lane + together;
      next = worker.run_of(after / call.heads, after % call.heads, hand_of(lane + together));
    }
    const AtHand hand = hand_of(lane);
    return AttentionRows::Rows{
        b,
        n,
        0,
        count,
        hand,
        query.get() + static_cast<std::size_t>(lane) * count * query_row,
        shifts.get() + static_cast<std::size_t>(lane) * count * shift_row,
        sums.get() + partial * sums_row,
        buckets + partial * bucket_row,
        max + partial,
        weight + partial,
        worker.coded(b, 0, worker.rows() - 1, hand).high,
        next};
  };
  const int64_t tasks_per_unit = chunks + exact_tasks;  // a unit is `together` lanes
  auto attend_chunk = [&](std::size_t index) {
    const int64_t lane = static_cast<int64_t>(index) / tasks_per_unit * together;
    const int64_t c = static_cast<int64_t>(index) % tasks_per_unit - exact_tasks;
    if (c < 0) return attend_exactly(static_cast<std::size_t>(lane));
    FloatBuffer work(worker.work_size(count));
    if (work.get() == nullptr) {
      complete = false;
      return;
    }
    AttentionRows::Rows heads[AttentionRows::kHeadsTogether];
    for (int64_t h = 0; h < together; ++h) heads[h] = rows_of(lane + h, c);
    const int64_t b = heads->b, at = (first_chunk + c) * chunk;
    const Range range = worker.coded(b, 0, worker.rows() - 1, heads->hand);
    const Range keys{std::max(range.low, at), std::min(range.high, at + chunk)};
    if (c == 0) worker.prefetch(b, heads->n, together, keys);
    const int some = static_cast<int>(together);
    if (!worker.skips(worker.past(b) + call.tokens)) {
      return worker.attend(heads, some, keys, c == 0, work.get());
    }
    const std::size_t first_row = static_cast<std::size_t>(lane) * count;
    worker.attend_skipping(heads, some, keys, c == 0,
                           window.is_on() ? exact_max + first_row : nullptr, work.get());
  };
  parallel(static_cast<std::size_t>(lanes / together * tasks_per_unit), attend_chunk);
  if (!complete) return false;

  auto merge = [&](std::size_t index) {
    FloatBuffer buffer(scratch);
    if (buffer.get() == nullptr) {
      complete = false;
      return;
    }
    int64_t flat_rows[kFlatRows];
    float *merged[kFlatRows], *merged_buckets[kFlatRows], *merged_exact[kFlatRows];
    float total[kFlatRows];
    const int64_t first = static_cast<int64_t>(index) * kFlatRows;
    const int some = static_cast<int>(std::min(kFlatRows, flat_count - first));
    for (int r = 0; r < some; ++r) {
      flat_rows[r] = flat_first + first + r;
      const int64_t row = lane_row(flat_rows[r]);
      const std::size_t begin =
          static_cast<std::size_t>(row / count * chunks * count + row % count);
      float factors[kMaxChunks + 2];
      float top = kNoMaximum;
      for (int64_t c = 0; c < chunks; ++c) top = std::max(top, max[begin + c * count]);
      if (window.is_on()) top = std::max(top, exact_max[row]);
      if (top == kNoMaximum) top = 0.0f;
      total[r] = 0.0f;
      for (int64_t c = 0; c < chunks; ++c) {
        factors[c] = std::exp(max[begin + c * count] - top);
        total[r] += factors[c] * weight[begin + c * count];
      }
      merged_exact[r] = exact_sums + static_cast<std::size_t>(row) * exact_row;
      if (window.is_on()) {
        const float share = std::exp(exact_max[row] - top);
        total[r] += share * exact_weight[row];
        kernels.scale(merged_exact[r], share, static_cast<int>(exact_row));
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
    worker.finish(flat_rows, some, merged, merged_buckets, merged_exact, total, buffer.get());
  };
  parallel(flat_tasks, merge);
  return complete;
}

bool run_chunked(const Kernels& kernels, const AttentionCall& call, const AttentionRows& worker,
                 const Parallel& parallel) {
  const Range all = range_of(call, worker);
  const int64_t lanes = call.batch * call.heads;
  const int64_t together = worker.heads_together();
  const int64_t wave = std::max<int64_t>(1, kWaveRows / worker.rows() / together) * together;
  for (int64_t first = 0; first < lanes; first += wave) {
    if (!run_wave(kernels, call, worker, all, first, std::min(wave, lanes - first), parallel)) {
      return false;
    }
  }
  return true;
}

}  // namespace

bool attention(const Kernels& kernels, const AttentionCall& call, const Parallel& parallel) {
  if (call.batch == 0 || call.query_heads == 0 || call.tokens == 0) return true;
  const AttentionRows worker(kernels, call);
  return is_prefill(worker) ? run_prefill(kernels, call, worker, parallel)
                            : run_chunked(kernels, call, worker, parallel);
}

}  // namespace tq
