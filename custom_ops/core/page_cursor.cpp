// Rows of blocks; the contract is in page_cursor.h.
#include "core/page_cursor.h"

#include <cstring>

namespace tq {

int64_t PageCursor::heads_together() const {
  int64_t together = call_.paging == nullptr ? 1 : std::min(call_.heads, kHeadsTogether);
  while (call_.heads % together != 0) --together;
  return together;
}

const uint8_t* PageCursor::block_rows(const CacheView& cache, int64_t b, int64_t n, int64_t at,
                                      int count, uint8_t* copy) const {
  if (!copies()) return row_of(cache, b, n, at);
  if (call_.window.has_planes) {
    const Planes planes = planes_of(call_, cache);
    const uint8_t* const codes = cache.rows + planes.codes(b, n, at);
    const uint8_t* const fields = cache.rows + planes.fields(b, n, at);
    const std::size_t code_bytes = static_cast<std::size_t>(planes.code_bytes);
    const std::size_t field_bytes = static_cast<std::size_t>(planes.field_bytes);
    uint8_t* row = copy;
    for (int t = 0; t < count; ++t, row += cache.stride) {
      std::memcpy(row, codes + t * planes.code_bytes, code_bytes);
      std::memcpy(row + code_bytes, fields + t * planes.field_bytes, field_bytes);
    }
    return copy;
  }
  for (int64_t some = 0, done = 0; done < count; done += some) {
    some = std::min(call_.paging->together(at + done), count - done);
    std::memcpy(copy + done * cache.stride, row_of(cache, b, n, at + done),
                static_cast<std::size_t>(some * cache.stride));
  }
  return copy;
}

std::size_t PageCursor::copy_size() const {
  if (!copies()) return 0;
  const int stride = std::max(call_.key.stride, call_.value.stride);
  return (static_cast<std::size_t>(kBlock * stride) / kCacheLine + 2) * (kCacheLine / 4);
}

}  // namespace tq
