// Scores of blocks of keys.
#pragma once

#include <cstdint>

#include "core/attention_call.h"
#include "core/head_task.h"
#include "core/kernels.h"
#include "core/row_prefetcher.h"
#include "core/row_reader.h"

namespace tq {

class Scorer {
 public:
  // Both outlive this object.
  Scorer(const RowReader& key, const RowReader& value) : key_(key), value_(value) {}

  // scores[r][t], without the scales of the keys. Prefetches the rows `later` of the keys, and the
  // block of values `values`, which may be null, but for what it returns: the rest of the keys, or of
  // the values where it `leaves` some.
  PrefetchRange score(const HeadTask& task, const uint8_t* keys, int count, float* scores,
                      float* work, RowSpan later, const uint8_t* values, bool leaves) const {
    PrefetchRange rest{};
    const float key_share = key_.prefetch_share();
    if (values == nullptr || count < kBlock) {
      key_.score(keys, count, task.query, task.count, work, scores,
                 key_.prefetch_range(later.rows, later.count, 0.0f, key_share));
      if (key_.is_integer()) {  // other products have prefetched what they read next
        rest = key_.prefetch_range(later.rows, later.count, key_share, 1.0f);
      }
      prefetch_now(value_.prefetch_range(values, count, 0.0f, 1.0f));
    } else {
      constexpr int kHalf = kBlock / 2;
      const float share = leaves ? key_share : 1.0f;
      key_.score(keys, kHalf, task.query, task.count, work, scores,
                 key_.prefetch_range(later.rows, later.count, 0.0f, 1.0f));
      key_.score(key_.behind(keys, kHalf), kHalf, task.query, task.count, work, scores + kHalf,
                 value_.prefetch_range(values, kBlock, 0.0f, share));
      rest = value_.prefetch_range(values, kBlock, share, 1.0f);
    }
    return rest;
  }

 private:
  const RowReader &key_, &value_;
};

}  // namespace tq
