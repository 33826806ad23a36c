// The calibration offsets that an encoder subtracts from keys or values: floats [rows, heads, D].
// Slot s uses row min(s, rows - 1). There are at most 64 rows, so the slots with a row of their own
// are in the first tile.
//
// Attention applies the last row to all slots: one number for all scores of a query, one vector added
// to the output. The slots before get the difference between their row and the last one.
#pragma once

#include "tile.h"

namespace tq {

template <uint32_t D>
class SlotOffsets {
 public:
  __aicore__ inline void init(TPipe* pipe, uint64_t offsets, uint32_t rows, uint32_t heads) {
    rows_ = offsets == 0 ? 0 : rows;
    heads_ = heads;
    offsets_.SetGlobalBuffer((__gm__ float*)offsets, static_cast<uint64_t>(rows_) * heads * D);
    pipe->InitBuffer(last_, D * sizeof(float));
  }

  // Slots with an offset of their own.
  __aicore__ inline uint32_t single() { return rows_ == 0 ? 0 : rows_ - 1; }

  // products[i] = the product of vector i with the last offset. A rotation came in behind whatever
  // the vector unit has read of an offset before.
  __aicore__ inline void dot_last(const LocalTensor<float>& products,
                                  const LocalTensor<float>& vectors, uint32_t head,
                                  uint32_t count, Tile<D>& tile) {
    const LocalTensor<float> last = last_.Get<float>(), scratch = tile.scratch();
    DataCopy(last, row(rows_ - 1, head), D);
    SetFlag<HardEvent::MTE2_V>(EVENT_ID2);
    WaitFlag<HardEvent::MTE2_V>(EVENT_ID2);
    for (uint32_t c = 0; c < Tile<D>::kChunks; ++c) {
      Mul(scratch[c * kLanes], vectors[c * kLanes], last[c * kLanes], kLanes,
          static_cast<uint8_t>(count), {1, 1, 1, Tile<D>::kStride, Tile<D>::kStride, 0});
    }
    PipeBarrier<PIPE_V>();
    tile.reduce_rows(products, count);
  }

  // matrix() = the offsets of the first `count` of them, less the last one.
  __aicore__ inline void load_differences(Tile<D>& tile, uint32_t head, uint32_t count) {
    const LocalTensor<float> matrix = tile.matrix();
    SetFlag<HardEvent::V_MTE2>(EVENT_ID2);
    WaitFlag<HardEvent::V_MTE2>(EVENT_ID2);
    load_last(head);
    for (uint32_t s = 0; s < count; ++s) DataCopy(matrix[s * D], row(s, head), D);
    SetFlag<HardEvent::MTE2_V>(EVENT_ID2);
    WaitFlag<HardEvent::MTE2_V>(EVENT_ID2);
    subtract_last(matrix, count);
  }

  // Starts to load the last offset.
  __aicore__ inline void load_last(uint32_t head) {
    DataCopy(last_.Get<float>(), row(rows_ - 1, head), D);
  }

  // Subtracts it, once it is there, from `count` rows.
  __aicore__ inline void subtract_last(const LocalTensor<float>& rows, uint32_t count) {
    const LocalTensor<float> last = last_.Get<float>();
    for (uint32_t c = 0; c < Tile<D>::kChunks; ++c) {
      Sub(rows[c * kLanes], rows[c * kLanes], last[c * kLanes], kLanes,
          static_cast<uint8_t>(count), {1, 1, 1, Tile<D>::kStride, Tile<D>::kStride, 0});
    }
    PipeBarrier<PIPE_V>();
  }

  // Adds the last offset to `count` outputs, as much as `shares` say. A rotation made those: it came
  // in behind whatever the vector unit has read of an offset before.
  __aicore__ inline void add_last(const LocalTensor<float>& outputs, uint32_t head,
                                  uint32_t count, const LocalTensor<float>& shares,
                                  Tile<D>& tile) {
    if (rows_ == 0) return;
    const LocalTensor<float> last = last_.Get<float>(), added = tile.scratch();
    DataCopy(last, row(rows_ - 1, head), D);
    SetFlag<HardEvent::MTE2_V>(EVENT_ID2);
    WaitFlag<HardEvent::MTE2_V>(EVENT_ID2);
    tile.spread(shares, 0, kTaskRows);
    for (uint32_t c = 0; c < Tile<D>::kChunks; ++c) {
      Mul(added[c * kLanes], last[c * kLanes], tile.spread(), kLanes, static_cast<uint8_t>(count),
          {1, 1, 0, Tile<D>::kStride, 0, 1});
    }
    PipeBarrier<PIPE_V>();
    Add(outputs, outputs, added, count * D);
    PipeBarrier<PIPE_V>();
  }

  // Starts to load the offset of a slot.
  __aicore__ inline void load(const LocalTensor<float>& to, uint64_t slot, uint32_t head) {
    DataCopy(to, row(slot < rows_ - 1 ? slot : rows_ - 1, head), D);
  }

  __aicore__ inline bool is_given() { return rows_ > 0; }

 private:
  // `head` is counted over all sequences.
  __aicore__ inline GlobalTensor<float> row(uint64_t index, uint32_t head) {
    return offsets_[(index * heads_ + head % heads_) * D];
  }

  uint32_t rows_, heads_;
  GlobalTensor<float> offsets_;
  TBuf<TPosition::VECCALC> last_;
};

}  // namespace tq
