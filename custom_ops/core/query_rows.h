// Query rows of a KV head: a row of KV head n is a pair (token t, head g of the group), t-major.
#pragma once

#include <cstdint>

#include "core/attention_call.h"
#include "core/window_rows.h"

namespace tq {

class QueryRows {
 public:
  // Both outlive this object.
  QueryRows(const AttentionCall& call, const WindowRows& window)
      : call_(call), window_(window), group_(call.group()), count_(group_ * call.tokens) {}

  int64_t count() const { return count_; }  // per KV head
  int64_t group() const { return group_; }
  int64_t token(int64_t row) const { return row / group_; }
  int64_t query_head(int64_t n, int64_t row) const { return n * group_ + row % group_; }

  // ---- rows of the tensors [B, H, T, D]
  int64_t flat(int64_t b, int64_t n, int64_t row) const {
    return (b * call_.query_heads + query_head(n, row)) * call_.tokens + token(row);
  }
  // KV head of such a row.
  int64_t head_of(int64_t flat_row) const {
    return flat_row / call_.tokens % call_.query_heads / group_;
  }
  // Its vector of the query and the output.
  int64_t vector_of(int64_t flat_row) const {
    if (call_.paging == nullptr) return flat_row;
    const int64_t query_head = flat_row / call_.tokens;
    return query_head % call_.query_heads * call_.paging->packed +
           call_.paging->starts[query_head / call_.query_heads] + flat_row % call_.tokens;
  }

  // ---- keys that rows see; both ends of a range rise with the row
  Range visible(int64_t b, int64_t first, int64_t last) const {
    return {visible_range(call_, b, token(first)).low, visible_range(call_, b, token(last)).high};
  }
  // What is read from rows of the cache: all, but for what is taken exactly.
  Range coded(int64_t b, int64_t row, const ResidentTokens& resident) const {
    return window_.coded(visible_range(call_, b, token(row)), call_.past(b) + token(row), resident);
  }
  Range coded(int64_t b, int64_t first, int64_t last, const ResidentTokens& resident) const {
    return {coded(b, first, resident).low, coded(b, last, resident).high};
  }
  // Of all rows of a KV head.
  Range coded_of_all(int64_t b, const ResidentTokens& resident) const {
    return coded(b, 0, count_ - 1, resident);
  }

 private:
  const AttentionCall& call_;
  const WindowRows& window_;
  const int64_t group_, count_;
};

}  // namespace tq
