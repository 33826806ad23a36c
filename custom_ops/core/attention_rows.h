// Attention of some query rows of one KV head against a range of keys. This class owns the parts of
// a call and drives them through the blocks of keys.
//
// Blocks have kBlock keys, counted from the start of the range. A row's sums depend on the ends of its
// range, never on which rows share a task.
//
// In long sequences a block of values with negligible weights is neither read nor multiplied. It is
// skipped if each weight is below `skip_below` times the largest weight known of its row: that of the
// exact window, or of the values added so far. Values are added kRowsAhead rows behind their keys.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/attention_call.h"
#include "core/head_task.h"
#include "core/kernels.h"
#include "core/online_softmax.h"
#include "core/page_cursor.h"
#include "core/query_rows.h"
#include "core/row_prefetcher.h"
#include "core/row_reader.h"
#include "core/scorer.h"
#include "core/window_rows.h"

namespace tq {

// Query rows of a KV head up to which a call is a decode step.
constexpr int kDecodeRows = 64;

class AttentionRows {
 public:
  // The call outlives this object.
  AttentionRows(const Kernels& kernels, const AttentionCall& call);
  AttentionRows(const AttentionRows&) = delete;
  AttentionRows& operator=(const AttentionRows&) = delete;

  const QueryRows& queries() const { return queries_; }
  const WindowRows& window() const { return window_; }
  const PageCursor& cursor() const { return cursor_; }

  std::size_t query_width() const { return static_cast<std::size_t>(key_->query_width()); }
  std::size_t sums_width() const { return static_cast<std::size_t>(value_->sums_width()); }
  std::size_t shift_width() const { return softmax_.shift_width(); }
  std::size_t bucket_width() const { return softmax_.bucket_width(); }
  // Scratch of prepare and finish, per row.
  std::size_t scratch_width() const {
    return static_cast<std::size_t>(call_.head_size) +
           static_cast<std::size_t>(std::max(key_->coordinates(), value_->coordinates()));
  }

  // Of at most kDecodeRows rows. `scratch` is [count, scratch_width]; query[r] has query_width
  // floats, shifts[r] shift_width, exact[r] window().width().
  void prepare(const int64_t* flat_rows, int count, float* scratch, float* const* query,
               float* const* shifts, float* const* exact) const;

  // Of `count` heads of one sequence, which have as many rows: fills sums, buckets, max and weight;
  // `work` has work_size(heads->count) floats. Of the ranges that a row's keys are split into, one
  // counts its sink.
  void attend(const HeadTask* heads, int count, Range keys, bool counts_sink, float* work) const;
  // The same of at most kDecodeRows rows, without values that hardly count; `exact_max` has the
  // maxima of what the rows of each head take exactly, head by head, or is null.
  void attend_skipping(const HeadTask* heads, int count, Range keys, bool counts_sink,
                       const float* exact_max, float* work) const;
  std::size_t work_size(int rows) const {
    return kWaiting * (static_cast<std::size_t>(rows) + 1) * kBlock + KeyBlock::kArrays * kBlock +
           std::max(key_->work_size(rows), value_->work_size(rows)) + 2 * cursor_.copy_size();
  }
  // Whether blocks may be skipped of sequences of so many keys.
  bool skips(int64_t keys) const {
    return call_.skip_below > 0.0f && keys > kSkipFrom && value_->is_integer() &&
           !softmax_.has_zeros() && call_.softcap == 0.0f && !cursor_.copies();
  }

  // What the queries of a KV head read in all.
  RowRun run_of(int64_t b, int64_t n, const ResidentTokens& resident) const {
    return prefetcher_.run_of(b, n, queries_.coded_of_all(b, resident));
  }
  // Prefetches the first rows of a range of keys of so many heads from n on; the kernels prefetch those
  // behind them.
  void prefetch(int64_t b, int64_t n, int64_t heads, Range keys) const;

  // Multiplies what row r has summed over rows of the caches, but not its weight.
  void scale_sums(const HeadTask& task, int r, float factor) const {
    softmax_.scale_sums(task, r, factor);
  }

  // Divides sums[r] by weight[r], un-rotates, adds the offsets' share and that of exact[r], writes
  // the output; zeros where weight[r] is zero.
  void finish(const int64_t* flat_rows, int count, const float* const* sums,
              const float* const* buckets, const float* const* exact, const float* weight,
              float* scratch) const;

 private:
  // Up to here next to nothing is skipped of real text.
  static constexpr int64_t kSkipFrom = 4096;
  // Blocks whose keys have been read and whose values have not: those ahead, and the one at work.
  static constexpr int kWaiting = RowPrefetcher::kBlocksAhead + 1;

  void attend_block(const BlockWalk& walk, int64_t item, float* work) const;
  // Scores of a block, without the scales of the keys.
  void score(const HeadTask& task, const uint8_t* keys, const KeyBlock& block, float* scores,
             float* work, RowSpan later, const uint8_t* values) const;
  // Adds the values of a block that has scores, and prefetches the rows `later`.
  void add_values(const HeadTask& task, const uint8_t* values, const KeyBlock& block, float* scores,
                  float* work, RowSpan later) const;
  // Whether a block with scores may be left out.
  bool hardly_counts(const HeadTask& task, const KeyBlock& block, const float* scores,
                     const float* exact_max) const;
  void prepare_shifts(int64_t b, int64_t head, const float* query, float* shifts) const;

  const Kernels& kernels_;
  const AttentionCall& call_;
  const std::unique_ptr<const RowReader> key_, value_;
  const WindowRows window_;
  const QueryRows queries_;
  const PageCursor cursor_;
  const RowPrefetcher prefetcher_;
  const Scorer scorer_;
  const OnlineSoftmax softmax_;
};

}  // namespace tq
