// Prefetches rows of the caches kRowsAhead rows ahead, and at the end of a KV head the first rows of
// the next one.
#pragma once

#include <cstdint>

#include "core/attention_call.h"
#include "core/head_task.h"
#include "core/page_cursor.h"
#include "core/row_reader.h"
#include "core/window_rows.h"

namespace tq {

// Into the second level, as the kernels do; a prefetch never faults.
void prefetch_now(PrefetchRange range);

class RowPrefetcher {
 public:
  // Blocks between what is read and what is prefetched.
  static constexpr int kBlocksAhead = kRowsAhead / kBlock;

  // All outlive this object.
  RowPrefetcher(const AttentionCall& call, const WindowRows& window, const PageCursor& cursor)
      : call_(call), window_(window), cursor_(cursor) {}

  // What the kernels prefetch while they read a block. Rows that do not lie together are prefetched
  // here, and nothing is left.
  RowSpan span_ahead(const RowReader& reader, const BlockWalk& walk, int64_t item) const;
  // All that the queries of a KV head read of `keys`, the entries of a window included.
  RowRun run_of(int64_t b, int64_t n, Range keys) const;
  // The first rows of a range of keys of so many heads from n on.
  void begin(const RowReader& reader, int64_t b, int64_t n, int64_t heads, Range keys) const;

 private:
  RowSpan span_from(const RowReader& reader, int64_t b, int64_t n, int64_t token,
                    int64_t count) const;
  void prefetch_rows(const RowReader& reader, int64_t b, int64_t n, Range keys) const;

  const AttentionCall& call_;
  const WindowRows& window_;
  const PageCursor& cursor_;
};

}  // namespace tq
