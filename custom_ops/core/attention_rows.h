// What one task of the attention does: some query rows of one KV head against a range of keys.
//
// A row of KV head n is a pair (token t, head g of the group), t-major. Keys come in blocks of
// kBlock from the start of the range; for each block the online softmax rescales what a row has
// summed so far when its maximum rises, then adds the block's weights and weighted values. So a
// row's sums depend on where its range starts and ends, never on which rows share a task.
//
// Keys and values are scale * number + zero, plus the offset of their slot, in the space of the
// vectors. So a score is scale * <q, numbers> + zero * sum(q) + <q, offset>, and what the offsets
// add to an output is the mean of the offsets by the weight of their slots, which is counted in one
// bucket per row of the offset; the last one is that of all later slots.
//
// Values that hardly count are neither read nor multiplied. A block of a long sequence is left out,
// of the sums and of the weights, where no weight of any of the rows is `skip_below` of the largest
// that is known of the row: of what it takes exactly, and of the values of its range that have been
// added, which wait kRowsAhead behind their keys.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/attention.h"
#include "core/cache_rows.h"
#include "core/kernels.h"
#include "core/window_rows.h"

namespace tq {

// Query rows of a KV head up to which a call is a decode step.
constexpr int kDecodeRows = 64;

class AttentionRows {
 public:
  // The call outlives this object.
  AttentionRows(const Kernels& kernels, const AttentionCall& call);

  static constexpr int64_t kHeadsTogether = 8;

  // ---- indices. A row of KV head n is a pair (token t, head g of the group), t-major.
  int64_t past(int64_t b) const { return call_.past_length[call_.length_per_batch ? b : 0]; }
  int64_t token(int64_t row) const { return row / group_; }
  int64_t query_head(int64_t n, int64_t row) const { return n * group_ + row % group_; }
  int64_t flat(int64_t b, int64_t n, int64_t row) const {
    return (b * call_.query_heads + query_head(n, row)) * call_.tokens + token(row);
  }

  // Vector of the query and the output, of a row that `flat` has made.
  int64_t vector_of(int64_t flat_row) const {
    if (call_.paging == nullptr) return flat_row;
    const int64_t lane = flat_row / call_.tokens;
    return lane % call_.query_heads * call_.paging->packed +
           call_.paging->starts[lane / call_.query_heads] + flat_row % call_.tokens;
  }

  Range visible(int64_t b, int64_t row) const {
    return visible_range(call_, b, past(b), token(row));
  }

  // Both ends of `visible` rise with the token.
  Range visible(int64_t b, int64_t first, int64_t last) const {
    return {visible(b, first).low, visible(b, last).high};
  }

  // What is read from rows: all, but for what is taken exactly.
  Range coded(int64_t b, int64_t row, const AtHand& hand) const {
    return window_.coded(visible(b, row), past(b) + token(row), hand);
  }
  Range coded(int64_t b, int64_t first, int64_t last, const AtHand& hand) const {
    return {coded(b, first, hand).low, coded(b, last, hand).high};
  }
  const WindowRows& window() const { return window_; }

  int64_t rows() const { return rows_; }  // query rows per KV head
  int64_t group() const { return group_; }
  std::size_t query_width() const { return static_cast<std::size_t>(key_.query_width()); }
  std::size_t sums_width() const { return static_cast<std::size_t>(value_.sums_width()); }
  // Per query row: its sum, then its product with each offset; nothing where nobody asks for it.
  std::size_t shift_width() const { return has_shift() ? 1 + bucket_width() : 0; }
  std::size_t bucket_width() const { return static_cast<std::size_t>(call_.offsets); }
  // Scratch of prepare and finish, per row.
  std::size_t scratch_width() const {
    return static_cast<std::size_t>(call_.head_size) +
           static_cast<std::size_t>(std::max(key_.coordinates(), value_.coordinates()));
  }

  // Rows of KV head n of sequence b, from that of token `first` on.
  struct Run {
    int64_t b, n, first, count;
  };
  // All that the queries of a KV head read, the entries of a window included.
  Run run_of(int64_t b, int64_t n, const AtHand& hand) const;

  // ---- query rows first .. first + count of KV head n of sequence b, and where results go.
  struct Rows {
    int64_t b, n, first;
    int count;
    AtHand hand;
    const float* query;   // [count, query_width], rotated and scaled, as the keys want it
    const float* shifts;  // [count, shift_width]
    float* sums;          // [count, sums_width], as the values want them
    float* buckets;       // [count, bucket_width], weights by row of the offset
    float* max;           // [count]
    float* weight;        // [count], sum of the exponentials
    int64_t end;          // of the keys that the head reads, in whatever ranges
    Run next;             // what is read after them; memory is asked for its first rows
  };

  // Of at most kDecodeRows rows. `scratch` is [count, scratch_width]; query[r] has query_width
  // floats, shifts[r] shift_width,
  // exact[r] window().width().
  void prepare(const int64_t* flat_rows, int count, float* scratch, float* const* query,
               float* const* shifts, float* const* exact) const;

  // Of `count` heads of one sequence, which have as many rows: fills sums, buckets, max and weight;
  // `work` has work_size(heads->count) floats. Of the ranges that a row's keys are split into, one
  // counts its sink.
  void attend(const Rows* heads, int count, Range keys, bool counts_sink, float* work) const;
  // The same of at most kDecodeRows rows, without values that hardly count; `exact_max` has the
  // maxima of what the rows of the only head take exactly, or is null.
  void attend_skipping(const Rows* heads, int count, Range keys, bool counts_sink,
                       const float* exact_max, float* work) const;
  // How many heads are best taken together: where pages have the rows of several heads one behind
  // the other, memory is read in the order in which they lie. Divides the number of heads.
  int64_t heads_together() const {
    int64_t together = call_.paging == nullptr ? 1 : std::min(call_.heads, kHeadsTogether);
    while (call_.heads % together != 0) --together;
    return together;
  }
  std::size_t work_size(int rows) const {
    return kWaiting * (static_cast<std::size_t>(rows) + 1) * kBlock + kBlockArrays * kBlock +
           std::max(key_.work_size(rows), value_.work_size(rows)) + 2 * copy_size();
  }
  // Whether blocks may be skipped of sequences of so many keys.
  bool skips(int64_t keys) const {
    return call_.skip_below > 0.0f && keys > kSkipFrom && value_.is_integer() && !has_zeros() &&
           has_plain_scores() && !copies();
  }

  // ---- blocks of keys
  // Where pages are no whole blocks, rows of a block are copied, to be read one after the other.
  bool copies() const {
    return call_.paging != nullptr && call_.paging->page_slots % kBlock != 0;
  }
  // Blocks of a range begin here, and every kBlock tokens from here on: never across two pages
  // unless they are copied.
  int64_t origin(Range keys) const {
    return call_.paging == nullptr ? keys.low : keys.low / kBlock * kBlock;
  }
  // Rows at .. at + count of a head of one cache, copied to `copy` where copies().
  const uint8_t* block_rows(const CacheView& cache, int64_t b, int64_t n, int64_t at, int count,
                            uint8_t* copy) const;
  // Floats that such a copy takes, with what kernels may read behind it.
  std::size_t copy_size() const {
    constexpr int kLine = 64;
    const int stride = std::max(call_.key.stride, call_.value.stride);
    return copies() ? (static_cast<std::size_t>(kBlock * stride) / kLine + 2) * (kLine / 4) : 0;
  }

  // Asks memory for the first rows of a range of keys of so many heads from n on; the kernels ask
  // for those behind them.
  void prefetch(int64_t b, int64_t n, int64_t heads, Range keys) const;

  // Multiplies what row r has summed over rows of the caches, but not its weight.
  void scale_sums(const Rows& rows, int r, float factor) const;

  // Divides sums[r] by weight[r], un-rotates, adds the offsets' share and that of exact[r], writes
  // the output; zeros where weight[r] is zero.
  void finish(const int64_t* flat_rows, int count, const float* const* sums,
              const float* const* buckets, const float* const* exact, const float* weight,
              float* scratch) const;

 private:
  // Keys at .. at + count, and what their rows say; arrays of kBlock.
  struct Block {
    int64_t at;
    int count;
    float *key_scales, *key_zeros, *value_zeros, *ones, *shift, *bias;
    float* value_scales;  // of each part of the rows
  };
  static constexpr int kBlockArrays = 6 + kMaxParts;
  // Of what a block asks memory for: of its keys' rows while it scores, the rest with the scales;
  // of its values' while it takes the softmax, the rest while it adds values. About as the time is,
  // since processors drop requests that come faster than memory answers.
  static constexpr float kScoreShare = 0.6f, kSoftenShare = 0.4f;
  static constexpr int kSoftRows = 16;  // rows whose softmax is taken together
  // Up to here next to nothing is skipped of real text.
  static constexpr int64_t kSkipFrom = 4096;
  // Blocks that memory is asked for prefetch.
  static constexpr int kItemsAhead = kRowsAhead / kBlock;
  // Blocks whose keys have been read and whose values have not: those, and the one at work.
  static constexpr int kWaiting = kItemsAhead + 1;

  // The blocks of a range of keys in the order in which they are read: block by block, and of each
  // head by head.
  class Walk {
   public:
    Walk(const AttentionRows& all, const Rows* heads, int count, Range keys)
        : heads_(heads), count_(count), keys_(keys), origin_(all.origin(keys)) {}

    int64_t items() const {
      const int64_t tokens = keys_.low < keys_.high ? keys_.high - origin_ : 0;
      return (tokens + kBlock - 1) / kBlock * count_;
    }
    const Rows& rows(int64_t item) const { return heads_[item % count_]; }
    // The first token of the block; of those behind the range, where it would be.
    int64_t at(int64_t item) const {
      return std::max(keys_.low, origin_ + item / count_ * kBlock);
    }
    int count(int64_t item) const {
      return static_cast<int>(std::min(origin_ + (item / count_ + 1) * kBlock, keys_.high) -
                              at(item));
    }

   private:
    const Rows* const heads_;
    const int64_t count_;
    const Range keys_;
    const int64_t origin_;
  };

  int64_t row_of(int64_t b, int64_t n, int64_t token) const {
    if (call_.paging != nullptr) return call_.paging->row(b, call_.heads, n, token);
    return (b * call_.heads + n) * call_.slots + call_.window.overlay_rows + token;
  }
  bool has_plain_scores() const { return call_.offsets == 0 && call_.softcap == 0.0f; }
  bool has_zeros() const { return key_.has_zeros() || value_.has_zeros(); }
  bool has_shift() const { return key_.has_zeros() || call_.offsets > 0; }
  int64_t offset_of(int64_t slot) const { return std::min(slot, call_.offsets - 1); }
  int64_t head_of(int64_t flat_row) const {
    return flat_row / call_.tokens % call_.query_heads / group_;
  }

  // What is read kItemsAhead after a block: nothing, up to a block.
  struct Later {
    const uint8_t* rows;
    int count;
  };
  Later later(const CacheRows& cache, const Walk& walk, int64_t item) const;
  void ask(const CacheRows& cache, int64_t b, int64_t n, Range keys) const;
  Later rows_from(const CacheRows& cache, int64_t b, int64_t n, int64_t token, int64_t count) const;

  Block block_at(int64_t at, int count, float*& work) const;
  void attend_block(const Walk& walk, int64_t item, float* work) const;
  void start(const Rows& rows, bool counts_sink) const;
  void score(const Rows& rows, const uint8_t* keys, const Block& block, float* scores,
             float* decoded, Later later, const uint8_t* values) const;
  void add_values(const Rows& rows, const uint8_t* values, const Block& block, float* scores,
                  float* decoded, Later later) const;
  // No kernel has both zeros and several parts.
  bool softens_whole() const { return !has_zeros() || value_.parts() == 1; }
  bool is_whole(const Rows& rows, int first, int count, const Block& block) const;
  bool has_zero_bias(const Rows& rows, int first, int count, const Block& block) const;
  int64_t bias_offset(const Rows& rows, int r, const Block& block) const;
  void softmax_block(const Rows& rows, int r, const Block& block, float* scores) const;
  void soften_and_quantise(const Rows& rows, int r, const Block& block, const uint8_t* values,
                           float* scores, float* numbers) const;
  void soften_whole(const Rows& rows, int first, int count, const Block& block,
                    const uint8_t* values, float* scores, float* numbers, PrefetchRange prefetch) const;
  void rescale(const Rows& rows, int r, float factor) const;
  void add_to_sums(const Rows& rows, int r, float zeros) const;
  void load_fields(const CacheRows& cache, const uint8_t* at, int count, float* scales,
                   float* zeros) const;
  PartScales weight_scales(const Rows& rows, const Block& block) const {
    return {block.value_scales, value_.parts(), rows.count * std::ptrdiff_t{kOperandFloats}};
  }
  // What weights that are not rounded yet are multiplied with.
  const float* float_scales(const Block& block) const {
    return value_.parts() > 1 ? block.ones : block.value_scales;
  }
  void weigh(const Rows& rows, int r, const Block& block, float max, float* scores) const;
  const float* load_shift(const Rows& rows, int r, const Block& block) const;
  const float* load_bias(const Rows& rows, int r, const Block& block) const;
  void start_from_sinks(const Rows& rows) const;

  const Kernels& kernels_;
  const AttentionCall& call_;
  const CacheRows key_, value_;
  const WindowRows window_;
  const int64_t group_;
  const int64_t rows_;
};

}  // namespace tq
