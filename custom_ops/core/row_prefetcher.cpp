// Prefetches of rows; the contract is in row_prefetcher.h.
#include "core/row_prefetcher.h"

#include <algorithm>

namespace tq {

void prefetch_now(PrefetchRange range) {
#if defined(__GNUC__)
  for (std::ptrdiff_t i = 0; i < range.bytes; i += kCacheLine) {
    __builtin_prefetch(range.begin + i, 0, 2);
  }
#else
  static_cast<void>(range);
#endif
}

RowSpan RowPrefetcher::span_ahead(const RowReader& reader, const BlockWalk& walk,
                                  int64_t item) const {
  const HeadTask& task = walk.task(item + kBlocksAhead);
  const int64_t token = walk.at(item + kBlocksAhead);
  if (cursor_.copies()) {
    prefetch_rows(reader, task.b, task.n, {token, std::min(token + kBlock, task.end)});
    return {nullptr, 0};
  }
  if (token < task.end) return span_from(reader, task.b, task.n, token, task.end - token);
  const int64_t skipped = (token - task.end) / kBlock * kBlock;
  const RowRun& next = task.next;
  if (skipped >= next.count) return {nullptr, 0};
  return span_from(reader, next.b, next.n, next.first + skipped, next.count - skipped);
}

// The entries of a window lie in front of the first key.
RowRun RowPrefetcher::run_of(int64_t b, int64_t n, Range keys) const {
  const bool has_entries = window_.is_on() && call_.paging == nullptr && keys.low < kRowsAhead;
  const int64_t first = has_entries ? -call_.window.overlay_rows : keys.low;
  return {b, n, first, keys.high - first};
}

void RowPrefetcher::begin(const RowReader& reader, int64_t b, int64_t n, int64_t heads,
                          Range keys) const {
  const int64_t of_head = (kBlocksAhead + heads - 1) / heads * kBlock;
  for (int64_t h = 0; h < std::min<int64_t>(heads, kBlocksAhead); ++h) {
    prefetch_rows(reader, b, n + h, {keys.low, std::min(keys.high, keys.low + of_head)});
  }
}

RowSpan RowPrefetcher::span_from(const RowReader& reader, int64_t b, int64_t n, int64_t token,
                                 int64_t count) const {
  return {cursor_.row_of(reader.cache(), b, n, token),
          static_cast<int>(cursor_.together(token, count))};
}

void RowPrefetcher::prefetch_rows(const RowReader& reader, int64_t b, int64_t n, Range keys) const {
  for (int64_t at = keys.low; at < keys.high;) {
    const RowSpan span = span_from(reader, b, n, at, keys.high - at);
    prefetch_now(reader.prefetch_range(span.rows, span.count, 0.0f, 1.0f));
    at += span.count;
  }
}

}  // namespace tq
