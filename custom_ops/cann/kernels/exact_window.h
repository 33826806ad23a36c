// The exact window of a cache (docs/operators.md): which tokens have entries, and where.
//
// An entry is D halves and a tag of 32 bits behind them, and fills whole rows of the cache. Entries
// are written where rows are encoded (entry_writer.h), and read where attention begins
// (exact_tokens.h); both make of a vector what an entry holds by `as_entries`.
//
// API forms used here that the headers do not list: Mins, Maxs, Adds with count; GetValue of local
// tensors. Not compiled with bisheng, not run on an NPU.
#pragma once

#include "tile.h"

namespace tq {

template <uint32_t D>
struct ExactWindow {
  static constexpr uint32_t kVector = spec::kEntryElementBytes * D;  // bytes, and the tag is behind
  static constexpr uint32_t kTag = spec::kEntryTagBytes;
  static_assert(kVector % kBlockBytes == 0 && sizeof(half) == spec::kEntryElementBytes &&
                    sizeof(uint32_t) == kTag,
                "vectors are whole blocks");

  uint32_t recent, sinks;  // how many of the newest and of the first tokens have entries

  __aicore__ inline bool is_on() const { return recent + sinks > 0; }
  __aicore__ inline uint32_t entries() const { return recent + sinks; }

  // The entry of a token that has one.
  __aicore__ inline uint32_t entry(uint32_t token) const {
    return token < sinks ? token : sinks + (token - sinks) % recent;
  }

  // Whether a call that ends at token `end` writes the entry of one of its tokens.
  __aicore__ inline bool is_written(uint32_t token, uint32_t end) const {
    return token < sinks || end - token <= recent;
  }
};

// Bytes of an entry in a cache with rows of `row_bytes`.
template <uint32_t D>
__aicore__ inline uint32_t entry_bytes(uint32_t row_bytes) {
  constexpr uint32_t kUsed = ExactWindow<D>::kVector + ExactWindow<D>::kTag;
  return (kUsed + row_bytes - 1) / row_bytes * row_bytes;
}

// to[i] = from[i] in the range of float16, and zeros where an element is not finite, for `count`
// rows of D floats. Zeros have no sign. `to` may be `from` or scratch().
template <uint32_t D>
__aicore__ inline void as_entries(Tile<D>& tile, const LocalTensor<float>& to,
                                  const LocalTensor<float>& from, uint32_t count) {
  const LocalTensor<float> spoilt = tile.spread();
  Muls(tile.scratch(), from, 0.0f, count * D);  // not 0 where an element is not finite
  PipeBarrier<PIPE_V>();
  tile.reduce_rows(spoilt, count);
  SetFlag<HardEvent::V_S>(EVENT_ID0);
  Mins(to, from, float{spec::kMaxHalf}, count * D);
  PipeBarrier<PIPE_V>();
  Maxs(to, to, float{-spec::kMaxHalf}, count * D);
  PipeBarrier<PIPE_V>();
  Adds(to, to, 0.0f, count * D);
  PipeBarrier<PIPE_V>();
  WaitFlag<HardEvent::V_S>(EVENT_ID0);
  for (uint32_t r = 0; r < count; ++r) {
    if (spoilt.GetValue(r) == 0.0f) continue;  // false for NaN
    Duplicate(to[r * D], 0.0f, D);
  }
  PipeBarrier<PIPE_V>();
}

}  // namespace tq
