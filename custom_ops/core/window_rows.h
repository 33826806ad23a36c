// Attention to the tokens of the exact window, with their unquantised vectors, in the space before the
// rotation.
//
// A query sees each token either as a quantised row or exactly. The rows [coded.low, coded.high) are
// the work of AttentionRows and of the tiles of a prefill; the exact tokens are the work of this
// class. Each part has a maximum, a weight and sums, which merge() joins.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>

#include "core/attention_call.h"
#include "core/kernels.h"
#include "core/row_reader.h"
#include "core/window.h"

namespace tq {

class WindowRows {
 public:
  // The call outlives this object.
  WindowRows(const Kernels& kernels, const AttentionCall& call);

  bool is_on() const { return call_.window.is_on(); }
  ResidentTokens resident_tokens(int64_t b, int64_t n) const;

  // The part of `visible` that a query at this position reads from rows.
  Range coded(Range visible, int64_t position, const ResidentTokens& resident) const {
    const int64_t high = std::min(visible.high, first_recent(position, resident));
    const int64_t low = std::max(visible.low, resident.sinks);
    return {low, std::max(low, high)};
  }

  // Floats of a query and of its sums; none without a window.
  std::size_t width() const {
    return is_on() ? static_cast<std::size_t>(entries_.key->query_width()) : 0;
  }
  void prepare_query(const float* natural, float* prepared) const {
    if (is_on()) entries_.key->prepare_query(natural, prepared);
  }
  // Whether a prepared query is the query itself, and sums lie as it does.
  bool takes_natural_queries() const {
    return width() == static_cast<std::size_t>(call_.head_size);
  }
  // x[j] += sums / weight, x [D] in the natural order.
  void add_share(const float* sums, float weight, float* x) const;

  // Query rows first .. first + count of KV head n of sequence b, as in AttentionRows.
  struct Rows {
    int64_t b, n, first;
    int count;
    ResidentTokens resident;
    const float* query;  // [count, width]
    float* sums;  // [count, width]
    float *max, *weight;  // [count]
  };

  // What row r takes exactly: sinks, and the newest tokens behind them.
  Range sinks_of(const Rows& rows, int r) const {
    const Range range = visible(rows, r);
    return {range.low, std::max(range.low, std::min(range.high, rows.resident.sinks))};
  }
  Range newest_of(const Rows& rows, int r) const {
    const Range range = visible(rows, r);
    const int64_t low = std::max(range.low, rows.resident.sinks);
    const int64_t from = std::max(low, first_recent(position(rows, r), rows.resident));
    return {from, std::max(from, range.high)};
  }
  // The vector [D] of a resident token, rounded as entries are.
  void load(const Rows& rows, int64_t token, bool is_key, float* x) const;

  // Fills sums, max and weight; `work` has work_size(rows.count) floats.
  void attend(const Rows& rows, float* work) const;
  std::size_t work_size(int rows) const;

  // Makes the maximum of two splits of a row's keys one; returns the factors of their sums and sets
  // `weight` to that of both.
  struct Factors {
    float coded, exact;
  };
  static Factors merge(float coded_max, float exact_max, float exact_weight, float* weight);

 private:
  struct Both {
    std::unique_ptr<const RowReader> key, value;
  };
  // Vectors of a block, one each `stride` bytes, and the tokens that they are of.
  struct Block {
    const Both& format;
    const uint8_t *keys, *values;
    int count;
    const int64_t* tokens;  // -1: of none
    bool is_run;  // one token after the other, none of them a sink
  };

  // Tokens of the call that are rounded at a time, and the floats that keys and values take.
  int new_at_once() const { return static_cast<int>(std::min<int64_t>(kBlock, call_.tokens)); }
  std::size_t new_size() const {  // in whole cache lines
    const std::size_t floats = static_cast<std::size_t>(new_at_once()) * call_.head_size;
    return (floats + 15) / 16 * 16;
  }
  int64_t position(const Rows& rows, int r) const {
    return call_.past(rows.b) + (rows.first + r) / group_;
  }
  Range visible(const Rows& rows, int r) const;
  int64_t first_recent(int64_t position, const ResidentTokens& resident) const {
    if (call_.window.recent == 0) return std::numeric_limits<int64_t>::max();
    const int64_t first =
        pages_ != nullptr ? pages_->oldest(position) : position - call_.window.recent + 1;
    return std::max(first, resident.recent);
  }
  // Vector of the call of a token, counted in new_keys.
  int64_t new_vector(int64_t b, int64_t n, int64_t token) const {
    const int64_t step = token - call_.past(b);
    if (call_.paging == nullptr) return (b * call_.heads + n) * call_.tokens + step;
    return n * call_.paging->packed + call_.paging->starts[b] + step;
  }
  // The entry of a token before the call; it may have another one's tag.
  const uint8_t* entry_of(bool is_key, int64_t b, int64_t n, int64_t token) const;
  // Entries from a place on; what is in front of the first place is none.
  const uint8_t* key_entries(int64_t b, int64_t n, int64_t place) const;
  const uint8_t* value_entries(int64_t b, int64_t n, int64_t place) const;
  int64_t first_place(int64_t b) const {
    const int64_t end = call_.past(b) + call_.tokens;
    return std::max(key_places_.first_place(end), value_places_.first_place(end));
  }
  bool has_entry(int64_t b, int64_t n, int64_t token) const;
  bool is_entry_of(int64_t b, int64_t n, int64_t entry, int64_t token) const;
  ResidentTokens resident_in_pages(int64_t b, int64_t n) const;
  void attend_entries(const Rows& rows, float* work) const;
  void attend_entries_of_pages(const Rows& rows, float* work) const;
  void attend_new(const Rows& rows, Range tokens, float* work) const;
  void attend_block(const Rows& rows, const Block& block, float* work) const;
  bool hide(const Rows& rows, int r, const Block& block, float* bias) const;

  const Kernels& kernels_;
  const AttentionCall& call_;
  const int64_t group_;
  const PageWindow* const pages_;  // null without pages, or without entries there
  const EntryPlaces key_places_, value_places_;  // without pages
  const Both entries_;  // readers of what entries hold; none without a window
  const Both new_;  // of vectors of the call, likewise
};

}  // namespace tq
