// Addresses of the rows of a block of tokens, in a contiguous or a paged cache.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/attention_call.h"
#include "core/head_task.h"
#include "core/kernels.h"

namespace tq {

class PageCursor {
 public:
  static constexpr int64_t kHeadsTogether = 8;

  // The call outlives this object.
  explicit PageCursor(const AttentionCall& call) : call_(call) {}

  // The row of a token in one of the caches; with planes its codes.
  const uint8_t* row_of(const CacheView& cache, int64_t b, int64_t n, int64_t token) const {
    if (call_.window.has_planes) return cache.rows + planes_of(call_, cache).codes(b, n, token);
    if (call_.paging == nullptr) {
      return lane_of(call_, cache, b, n) + (call_.window.overlay_rows + token) * cache.stride;
    }
    return page_of(call_, cache, b, n, token) + token % call_.paging->page_slots * cache.stride;
  }
  // Of `count` tokens from this one on: how many have rows that lie together; at most a block.
  int64_t together(int64_t token, int64_t count) const {
    const int64_t some = std::min<int64_t>(kBlock, count);
    return call_.paging == nullptr ? some : std::min(some, call_.paging->together(token));
  }
  // How many heads are best taken together: where pages have the rows of several heads one behind
  // the other, memory is read in the order in which they lie. Divides the number of heads.
  int64_t heads_together() const;

  // Where pages are no whole blocks, and with planes, rows of a block are copied, to be read one after
  // the other.
  bool copies() const {
    return call_.window.has_planes ||
           (call_.paging != nullptr && call_.paging->page_slots % kBlock != 0);
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
  std::size_t copy_size() const;

 private:
  const AttentionCall& call_;
};

// The blocks of a range of keys of some heads in the order in which they are read: block by block, and
// of each head by head.
class BlockWalk {
 public:
  BlockWalk(const PageCursor& cursor, const HeadTask* heads, int count, Range keys)
      : heads_(heads), count_(count), keys_(keys), origin_(cursor.origin(keys)) {}

  int64_t items() const {
    const int64_t tokens = keys_.low < keys_.high ? keys_.high - origin_ : 0;
    return (tokens + kBlock - 1) / kBlock * count_;
  }
  const HeadTask& task(int64_t item) const { return heads_[item % count_]; }
  // The first token of the block; of those behind the range, where it would be.
  int64_t at(int64_t item) const { return std::max(keys_.low, origin_ + item / count_ * kBlock); }
  int count(int64_t item) const {
    return static_cast<int>(std::min(origin_ + (item / count_ + 1) * kBlock, keys_.high) -
                            at(item));
  }

 private:
  const HeadTask* const heads_;
  const int64_t count_;
  const Range keys_;
  const int64_t origin_;
};

}  // namespace tq
