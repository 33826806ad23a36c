// The entries of new tokens on their way into a cache (exact_window.h), beside their rows.
//
// The task that encodes a token writes its entry. A sequence without a past begins with tags of 0:
// those that no token of the call overwrites are cleared.
//
//   2201  stores an entry, and clears tags, with DataCopyPad.
//   2002  stores whole blocks and, once more, the last 32 bytes, one store behind the other. With a tag it clears the 28 bytes
//         before it, which belong to a vector that is not read without its tag.
//
// API forms used here that the headers do not list: Cast of float -> half with a mask of 64 and
// strides; Duplicate of int32_t; Gather of uint16_t on 2002. Not compiled with bisheng, not run on an
// NPU.
#pragma once

#include "exact_window.h"

namespace tq {

template <uint32_t D>
class EntryWriter {
 public:
  __aicore__ inline void init(TPipe* pipe, const ExactWindow<D>& window,
                              const CachePlaces& places) {
    window_ = window;
    places_ = places;
    bytes_ = entry_bytes<D>(places.row_bytes);
    pipe->InitBuffer(images_, kTaskRows * kPlace);
#if __NPU_ARCH__ == 2002
    if (!is_on()) return;
    pipe->InitBuffer(tails_, kTaskRows * kBlockBytes);
    pipe->InitBuffer(tail_places_, kTaskRows * kHalves * sizeof(uint32_t));
    const LocalTensor<uint32_t> tails = tail_places_.Get<uint32_t>();
    for (uint32_t i = 0; i < kTaskRows * kHalves; ++i) {
      tails.SetValue(i, i / kHalves * kPlace + bytes_ - kBlockBytes +
                            i % kHalves * static_cast<uint32_t>(sizeof(uint16_t)));
    }
    SetFlag<HardEvent::S_V>(EVENT_ID1);
    WaitFlag<HardEvent::S_V>(EVENT_ID1);
#endif
  }

  __aicore__ inline bool is_on() { return window_.is_on(); }

  // Clears the tags of a sequence and head whose first `tokens` tokens come with this call.
  __aicore__ inline void clear(Tile<D>& tile, const GlobalTensor<uint8_t>& cache, uint32_t lane,
                               uint32_t tokens) {
    const LocalTensor<uint8_t> zeros = tile.spread().template ReinterpretCast<uint8_t>();
    for (uint32_t first = tokens; first < window_.entries(); first += kTileRows) {
      const uint32_t left = window_.entries() - first;
      clear_some(zeros, cache, place(lane, first) + ExactWindow<D>::kVector,
                 left < kTileRows ? left : kTileRows);
    }
  }

  // `vectors` are `count` tokens from `first` of a call that ends at `end`.
  __aicore__ inline void write(Tile<D>& tile, const LocalTensor<float>& vectors,
                               const GlobalTensor<uint8_t>& cache, uint32_t lane, uint32_t first,
                               uint32_t count, uint32_t end) {
    // Of these the last has an entry if any but a sink has.
    if (!window_.is_written(first, end) && !window_.is_written(first + count - 1, end)) return;
    const LocalTensor<half> images = images_.Get<half>();
    const LocalTensor<int32_t> words = images_.Get<int32_t>();
    Duplicate(words, 0, kTaskRows * kPlace / static_cast<uint32_t>(sizeof(int32_t)));
    as_entries(tile, tile.scratch(), vectors, count);
    for (uint32_t c = 0; c < Tile<D>::kChunks; ++c) {
      Cast(images[c * kLanes], tile.scratch()[c * kLanes], RoundMode::CAST_NONE, kLanes,
           static_cast<uint8_t>(count), {1, 1, kPlace / kBlockBytes, Tile<D>::kStride});
    }
    for (uint32_t r = 0; r < count; ++r) {
      Duplicate(words[(r * kPlace + ExactWindow<D>::kVector) / sizeof(int32_t)],
                static_cast<int32_t>(first + r + 1), 1);
    }
#if __NPU_ARCH__ == 2002
    PipeBarrier<PIPE_V>();
    Gather(tails_.Get<uint16_t>(), images_.Get<uint16_t>(), tail_places_.Get<uint32_t>(),
           static_cast<uint32_t>(0), count * kHalves);
#endif
    SetFlag<HardEvent::V_MTE3>(EVENT_ID1);
    WaitFlag<HardEvent::V_MTE3>(EVENT_ID1);
    for (uint32_t r = 0; r < count; ++r) {
      if (window_.is_written(first + r, end)) store(cache, place(lane, window_.entry(first + r)), r);
    }
  }

 private:
  static constexpr uint32_t kHalves = kBlockBytes / sizeof(uint16_t);
  // Room for the largest entry: a row less than whole rows more than it needs.
  static constexpr uint32_t kPlace = ExactWindow<D>::kVector + 3 * kBlockBytes;
  static_assert(ExactWindow<D>::kTag + RowConstants<D, 5, spec::Kind::kLloydMax>::kBytes <=
                    kPlace - ExactWindow<D>::kVector,
                "rows of 5 bits are the widest");

  __aicore__ inline uint64_t place(uint32_t lane, uint32_t entry) {
    return places_.entries(lane) + static_cast<uint64_t>(entry) * bytes_;
  }

  __aicore__ inline void store(const GlobalTensor<uint8_t>& cache, uint64_t to, uint32_t r) {
    const LocalTensor<uint8_t> image = images_.Get<uint8_t>()[r * kPlace];
#if __NPU_ARCH__ == 2201
    const DataCopyExtParams whole{1, bytes_, 0, 0, 0};
    DataCopyPad(cache[to], image, whole);
#else
    PipeBarrier<PIPE_MTE3>();  // neighbours share a line
    DataCopy(cache[to], image, bytes_ / kBlockBytes * kBlockBytes);
    PipeBarrier<PIPE_MTE3>();
    DataCopy(cache[to + bytes_ - kBlockBytes], tails_.Get<uint8_t>()[r * kBlockBytes],
             kBlockBytes);
#endif
  }

  // Clears `count` tags, the first of which is at `first`.
  __aicore__ inline void clear_some(const LocalTensor<uint8_t>& zeros,
                                    const GlobalTensor<uint8_t>& cache, uint64_t first,
                                    uint32_t count) {
    Duplicate(zeros.ReinterpretCast<int32_t>(), 0, count * kBlockFloats);
    SetFlag<HardEvent::V_MTE3>(EVENT_ID1);
    WaitFlag<HardEvent::V_MTE3>(EVENT_ID1);
#if __NPU_ARCH__ == 2201
    const DataCopyExtParams tags{static_cast<uint16_t>(count), ExactWindow<D>::kTag, 0,
                                 bytes_ - ExactWindow<D>::kTag, 0};
    DataCopyPad(cache[first], zeros, tags);
#else
    const uint64_t begin = first + ExactWindow<D>::kTag - kBlockBytes;
    for (uint32_t i = 0; i < count; ++i) {
      DataCopy(cache[begin + static_cast<uint64_t>(i) * bytes_], zeros[i * kBlockBytes],
               kBlockBytes);
    }
#endif
    SetFlag<HardEvent::MTE3_V>(EVENT_ID1);
    WaitFlag<HardEvent::MTE3_V>(EVENT_ID1);
  }

  ExactWindow<D> window_;
  CachePlaces places_;
  uint32_t bytes_;
  TBuf<TPosition::VECCALC> images_;
#if __NPU_ARCH__ == 2002
  TBuf<TPosition::VECCALC> tails_, tail_places_;
#endif
};

}  // namespace tq
