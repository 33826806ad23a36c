// The tokens of the exact window that the queries of a task read (docs/operators.md), and a tile of
// their vectors.
//
// A token is resident if its entry has its tag. A query reads two ranges of entries: the first
// tokens up to the number of sinks, ending at the first token that is not resident; and the newest
// tokens, back to the last one that is not resident or that lies more than `recent` tokens before the
// query. Cache rows between the two ranges are read as codes. The scalar unit finds both ends by
// comparing tags, beginning with the task's oldest query. Tokens of the call are resident: their
// vectors are read from their entries where the call wrote one, and otherwise from the call's inputs,
// rounded as an entry is.
//
// Vectors are not rotated. The last calibration offset is subtracted from values, because attention
// adds it to the output (slot_offsets.h).
//
// API forms used here that the headers do not list: Cast of float -> half with count; GetValue of
// local tensors. Not compiled with bisheng, not run on an NPU.
#pragma once

#include "exact_window.h"
#include "row_reader.h"
#include "slot_offsets.h"

namespace tq {

// The caches of keys and values, and what the call adds to them.
enum class Side : uint32_t { kKeys = 0, kValues = 1 };
constexpr uint32_t kSides = 2;

template <uint32_t D, typename T>
class ExactTokens {
 public:
  __aicore__ inline void init(TPipe* pipe, const ExactWindow<D>& window, uint32_t new_tokens) {
    window_ = window;
    new_tokens_ = new_tokens;
    pipe->InitBuffer(halves_, kTileRows * D * sizeof(half));
    pipe->InitBuffer(tags_, kSides * kTileRows * kBlockBytes);
  }

  // `lanes` are the heads of all sequences.
  __aicore__ inline void give(Side which, CachedRows<D>& cache, uint64_t vectors, uint64_t lanes) {
    Source& source = sources_[static_cast<uint32_t>(which)];
    source.places = cache.places();
    source.bytes = entry_bytes<D>(source.places.row_bytes);
    source.entries = cache.global();
    source.vectors.SetGlobalBuffer((__gm__ T*)vectors, lanes * new_tokens_ * D);
  }

  __aicore__ inline bool is_on() { return window_.is_on(); }

  // Looks at the tags of a sequence and head, whose oldest query sees `seen` keys.
  __aicore__ inline void find(uint32_t lane, uint32_t past, uint32_t seen) {
    lane_ = lane;
    past_ = past;
    end_ = past + new_tokens_;
    first_ = window_.sinks < end_ ? window_.sinks : end_;
    newest_ = 0;
    const uint32_t sinks = window_.sinks < past ? window_.sinks : past;
    for (uint32_t from = 0; from < sinks; from += kTileRows) {
      const uint32_t count = sinks - from < kTileRows ? sinks - from : kTileRows;
      load_tags(from, count);
      uint32_t found = 0;
      while (found < count && is_resident(from, found)) ++found;
      if (found == count) continue;
      first_ = from + found;
      break;
    }
    const uint32_t oldest = seen > window_.recent ? seen - window_.recent : 0;
    for (uint32_t end = past; end > oldest;) {
      const uint32_t count = end - oldest < kTileRows ? end - oldest : kTileRows;
      load_tags(end - count, count);
      uint32_t lost = count;
      while (lost > 0 && is_resident(end - count, lost - 1)) --lost;
      end -= count;
      if (lost == 0) continue;
      newest_ = end + lost;
      break;
    }
  }

  // The first and the end of the cache rows that a query with `seen` visible keys reads.
  __aicore__ inline uint32_t rows_begin() { return first_; }
  __aicore__ inline uint32_t rows_end(uint32_t seen) {
    if (window_.recent == 0) return seen;
    const uint32_t oldest = seen > window_.recent ? seen - window_.recent : 0;
    return oldest > newest_ ? oldest : newest_;
  }

  // How many of the tokens first .. end - 1 are loaded at once.
  __aicore__ inline uint32_t together(uint32_t first, uint32_t end) {
    uint32_t count = end - first;
    const uint32_t entries = past_ > window_.sinks ? past_ : window_.sinks;
    const uint32_t other = is_of_call(first) ? end_ - window_.recent : entries;
    if (first < other && other - first < count) count = other - first;
    return count < kTileRows ? count : kTileRows;
  }

  // matrix() = the keys or values of `count` tokens; `offsets` are those of values.
  __aicore__ inline void load(Tile<D>& tile, SlotOffsets<D>& offsets, Side which, uint32_t first,
                              uint32_t count) {
    const Source& source = sources_[static_cast<uint32_t>(which)];
    const LocalTensor<float> matrix = tile.matrix();
    const LocalTensor<half> halves = halves_.Get<half>();
    const bool is_new = is_of_call(first);
    const bool has_offset = which == Side::kValues && offsets.is_given();
    SetFlag<HardEvent::V_MTE2>(EVENT_ID2);
    WaitFlag<HardEvent::V_MTE2>(EVENT_ID2);
    if (has_offset) offsets.load_last(lane_);
    if (is_new) {
      const uint64_t row = static_cast<uint64_t>(lane_) * new_tokens_ + first - past_;
      DataCopy(elements(tile), source.vectors[row * D], count * D);
    } else {
      load_entries(halves_.Get<uint8_t>(), source, 0, ExactWindow<D>::kVector, first, count);
    }
    SetFlag<HardEvent::MTE2_V>(EVENT_ID2);
    WaitFlag<HardEvent::MTE2_V>(EVENT_ID2);
    if (!is_new || sizeof(T) == sizeof(half)) {
      Cast(matrix, halves, RoundMode::CAST_NONE, count * D);
      PipeBarrier<PIPE_V>();
    }
    if (is_new) {
      as_entries(tile, matrix, matrix, count);
      if constexpr (sizeof(T) != sizeof(half)) {
        Cast(halves, matrix, RoundMode::CAST_NONE, count * D);
        PipeBarrier<PIPE_V>();
        Cast(matrix, halves, RoundMode::CAST_NONE, count * D);
        PipeBarrier<PIPE_V>();
      }
    }
    if (has_offset) offsets.subtract_last(matrix, count);
  }

 private:
  struct Source {
    uint32_t bytes;  // of an entry
    CachePlaces places;
    GlobalTensor<uint8_t> entries;
    GlobalTensor<T> vectors;
  };

  // Whether a resident token belongs to the call and has no entry.
  __aicore__ inline bool is_of_call(uint32_t token) {
    return token >= past_ && !window_.is_written(token, end_);
  }

  __aicore__ inline LocalTensor<T> elements(Tile<D>& tile) {
    if constexpr (sizeof(T) != sizeof(half)) return tile.matrix().template ReinterpretCast<T>();
    else return halves_.template Get<T>();
  }

  // `bytes` from byte `from` of the entries of `count` tokens, whose entries run on until the last
  // one of all.
  __aicore__ inline void load_entries(const LocalTensor<uint8_t>& to, const Source& source,
                                      uint32_t from, uint32_t bytes, uint32_t first,
                                      uint32_t count) {
    const uint64_t begin = source.places.entries(lane_) + from;
    for (uint32_t done = 0; done < count;) {
      const uint32_t entry = window_.entry(first + done), left = window_.entries() - entry;
      const uint32_t some = count - done < left ? count - done : left;
      load_pieces(to[done * bytes], source.entries,
                  begin + static_cast<uint64_t>(entry) * source.bytes, some, bytes, source.bytes);
      done += some;
    }
  }

  // A block of each entry, of which the tag is the end.
  __aicore__ inline void load_tags(uint32_t first, uint32_t count) {
    for (uint32_t s = 0; s < kSides; ++s) {
      load_entries(tags_.Get<uint8_t>()[s * kTileRows * kBlockBytes], sources_[s],
                   ExactWindow<D>::kVector + ExactWindow<D>::kTag - kBlockBytes, kBlockBytes, first,
                   count);
    }
    SetFlag<HardEvent::MTE2_S>(EVENT_ID2);
    WaitFlag<HardEvent::MTE2_S>(EVENT_ID2);
  }

  // By the tags that were loaded from token `first` on.
  __aicore__ inline bool is_resident(uint32_t first, uint32_t index) {
    const LocalTensor<uint32_t> tags = tags_.Get<uint32_t>()[kBlockFloats - 1];
    const uint32_t tag = first + index + 1;
    return tags.GetValue(index * kBlockFloats) == tag &&
           tags.GetValue((kTileRows + index) * kBlockFloats) == tag;
  }

  ExactWindow<D> window_;
  uint32_t new_tokens_, lane_, past_, end_;
  uint32_t first_;   // sinks before it are resident
  uint32_t newest_;  // tokens from it on are resident
  Source sources_[kSides];
  TBuf<TPosition::VECCALC> halves_, tags_;
};

}  // namespace tq
