// A tile of 64 rows of D floats in UB, and what both kernels do with it: sums of weighted rows, and
// the product of every row with a vector. Either takes all rows of the tile with each instruction.
//
// API forms relied on. With `mask, repeats, strides` (a repeat is 64 floats, strides in blocks of
// 32 bytes, a stride of 0 repeats an operand): Mul, Add, Sub, Div, Cast, BlockReduceMax and
// BlockReduceSum (repeats, mask, dstRepStride, srcBlkStride, srcRepStride). With `count`: Add, Adds,
// Muls, Duplicate, Gather (byte offsets as uint32_t and a byte base). Mask and repeats of one call
// are at most 64 and 255.
//
// Between an instruction of the vector pipe and one that reads or overwrites what it wrote there is
// a PipeBarrier, or a flag to another pipe and one back. The scalar, vector and transfer pipes are
// ordered by flags, nothing is implied. There are no more of them than that: the test that deletes
// them one by one (testing/mutations.py) finds a hazard without any of them. Functions leave the
// barrier behind their last instruction to what follows where that has one anyway.
//
// Constants that instructions take by reference are copied (float{kConstant}): the device has no
// address for them.
#pragma once

#include "arch.h"

namespace tq {

template <uint32_t D>
class Tile {
 public:
  static constexpr uint32_t kChunks = D / kLanes;         // repeats in a row
  static constexpr uint32_t kStride = D / kBlockFloats;   // blocks from row to row
  static_assert(D % kLanes == 0 && kStride < 256, "rows are whole repeats");

  __aicore__ inline void init(TPipe* pipe) {
    pipe->InitBuffer(matrix_, kTileRows * D * sizeof(float));
    pipe->InitBuffer(scratch_, kTileRows * D * sizeof(float));
    pipe->InitBuffer(spread_, kTileRows * kBlockBytes);
    pipe->InitBuffer(partial_, kTileRows * kBlockBytes);
    pipe->InitBuffer(totals_, kTileRows * sizeof(float));
    pipe->InitBuffer(ordered_, D * sizeof(float));
    places_.init(pipe, kTileRows);
    // Of the last rows of a tile that is not full whole blocks are added up, too.
    Duplicate(partial_.Get<float>(), 0.0f, kTileRows * kBlockFloats);
  }

  // What is written there has coordinates in their order.
  __aicore__ inline LocalTensor<float> matrix() {
    is_paired_ = false;
    return matrix_.Get<float>();
  }

  // Likewise, for rows whose coordinates i and i + D / 2 are neighbours: `pair` has the bytes from
  // where a vector gets that order, `part` those from where it gets its own.
  __aicore__ inline LocalTensor<float> paired_matrix(const LocalTensor<uint32_t>& pair,
                                                     const LocalTensor<uint32_t>& part) {
    is_paired_ = true;
    pair_ = pair;
    part_ = part;
    return matrix_.Get<float>();
  }
  __aicore__ inline LocalTensor<float> scratch() { return scratch_.Get<float>(); }
  __aicore__ inline LocalTensor<float> spread() { return spread_.Get<float>(); }

  // spread()[i] = the floats from byte `base` of `from`, each in a block of its own: `count` of
  // them, and up to the next multiple of 8, which must have been written.
  __aicore__ inline void spread(const LocalTensor<float>& from, uint32_t base, uint32_t count) {
    places_.copy(spread_.Get<float>(), from, base, whole(count));
    PipeBarrier<PIPE_V>();
  }

  // sums[i] = scratch()[i] summed, for `count` rows.
  __aicore__ inline void reduce_rows(const LocalTensor<float>& sums, uint32_t count) {
    const LocalTensor<float> products = scratch();
    for (uint32_t c = 1; c < kChunks; ++c) {
      Add(products, products, products[c * kLanes], kLanes, count,
          {1, 1, 1, kStride, kStride, kStride});
      PipeBarrier<PIPE_V>();
    }
    // By blocks twice: reductions of whole rows are said to take five times as long.
    const LocalTensor<float> partial = partial_.Get<float>(), totals = totals_.Get<float>();
    BlockReduceSum(partial, products, count, kLanes, 1, 1, kStride);
    PipeBarrier<PIPE_V>();
    const bool is_whole = whole(count) == count;
    BlockReduceSum(is_whole ? sums : totals, partial, whole(count) / kBlockFloats, kLanes, 1, 1,
                   kLanes / kBlockFloats);
    PipeBarrier<PIPE_V>();
    if (is_whole) return;
    Adds(sums, totals, 0.0f, count);
    PipeBarrier<PIPE_V>();
  }

  // sums[i] = matrix()[i] . vector, for `count` rows.
  __aicore__ inline void dot_rows(const LocalTensor<float>& sums, const LocalTensor<float>& vector,
                                  uint32_t count) {
    const LocalTensor<float> rows = matrix_.Get<float>(), products = scratch();
    const LocalTensor<float> factors = is_paired_ ? ordered_.Get<float>() : vector;
    if (is_paired_) reorder(vector, pair_);
    for (uint32_t c = 0; c < kChunks; ++c) {
      Mul(products[c * kLanes], rows[c * kLanes], factors[c * kLanes], kLanes, count,
          {1, 1, 1, kStride, kStride, 0});
    }
    PipeBarrier<PIPE_V>();
    reduce_rows(sums, count);
  }

  // sum += weights[first + i] matrix()[first + i], for `count` rows; weights[0] is at byte `base`, a
  // multiple of 32, of `weights`.
  __aicore__ inline void add_rows(const LocalTensor<float>& sum, const LocalTensor<float>& weights,
                                  uint32_t base, uint32_t count, uint32_t first = 0) {
    const LocalTensor<float> rows = matrix_.Get<float>()[first * D], products = scratch();
    const uint32_t before = first % kBlockFloats;
    spread(weights, base + (first - before) * static_cast<uint32_t>(sizeof(float)), before + count);
    const LocalTensor<float> factors = spread()[before * kBlockFloats];
    for (uint32_t c = 0; c < kChunks; ++c) {
      Mul(products[c * kLanes], rows[c * kLanes], factors, kLanes, count,
          {1, 1, 0, kStride, kStride, 1});
    }
    PipeBarrier<PIPE_V>();
    while (count > 1) {
      const uint32_t kept = (count + 1) / 2;
      Add(products, products, products[kept * D], (count - kept) * D);
      PipeBarrier<PIPE_V>();
      count = kept;
    }
    if (is_paired_) reorder(products, part_);
    Add(sum, sum, is_paired_ ? ordered_.Get<float>() : products, D);
    PipeBarrier<PIPE_V>();
  }

  // rows[i] = rows[i] * factors[i] or rows[i] / factors[i], for kTaskRows rows of D floats.
  __aicore__ inline void multiply_rows(const LocalTensor<float>& rows,
                                       const LocalTensor<float>& factors) {
    spread(factors, 0, kTaskRows);
    for (uint32_t c = 0; c < kChunks; ++c) {
      Mul(rows[c * kLanes], rows[c * kLanes], spread(), kLanes, kTaskRows,
          {1, 1, 0, kStride, kStride, 1});
    }
  }

  __aicore__ inline void divide_rows(const LocalTensor<float>& rows,
                                     const LocalTensor<float>& divisors) {
    spread(divisors, 0, kTaskRows);
    for (uint32_t c = 0; c < kChunks; ++c) {
      Div(rows[c * kLanes], rows[c * kLanes], spread(), kLanes, kTaskRows,
          {1, 1, 0, kStride, kStride, 1});
    }
  }

  // rotated[i] = vectors[i] R, for `count` of kTaskRows rows; R comes through matrix().
  __aicore__ inline void rotate(const LocalTensor<float>& rotated,
                                const LocalTensor<float>& vectors,
                                const GlobalTensor<float>& rotation, uint32_t count) {
    Duplicate(rotated, 0.0f, kTaskRows * D);
    for (uint32_t first = 0; first < D; first += kTileRows) {
      load_rotation(rotation, first);
      for (uint32_t r = 0; r < count; ++r) {
        add_rows(rotated[r * D], vectors, (r * D + first) * sizeof(float), kTileRows);
      }
    }
  }

  // vectors[i] = rotated[i] R^T, likewise.
  __aicore__ inline void rotate_back(const LocalTensor<float>& vectors,
                                     const LocalTensor<float>& rotated,
                                     const GlobalTensor<float>& rotation, uint32_t count) {
    for (uint32_t first = 0; first < D; first += kTileRows) {
      load_rotation(rotation, first);
      for (uint32_t r = 0; r < count; ++r) {
        dot_rows(vectors[r * D + first], rotated[r * D], kTileRows);
      }
    }
  }

 private:
  static_assert(D % kTileRows == 0, "a rotation is whole tiles");

  __aicore__ inline uint32_t whole(uint32_t count) {
    return (count + kBlockFloats - 1) / kBlockFloats * kBlockFloats;
  }

  // ordered_ = a vector in another order.
  __aicore__ inline void reorder(const LocalTensor<float>& vector,
                                 const LocalTensor<uint32_t>& places) {
    Gather(ordered_.Get<float>(), vector, places, static_cast<uint32_t>(0), D);
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void load_rotation(const GlobalTensor<float>& rotation, uint32_t first) {
    SetFlag<HardEvent::V_MTE2>(EVENT_ID2);
    WaitFlag<HardEvent::V_MTE2>(EVENT_ID2);
    DataCopy(matrix(), rotation[first * D], kTileRows * D);
    SetFlag<HardEvent::MTE2_V>(EVENT_ID2);
    WaitFlag<HardEvent::MTE2_V>(EVENT_ID2);
  }

  bool is_paired_ = false;
  LocalTensor<uint32_t> pair_, part_;
  Spread places_;
  TBuf<TPosition::VECCALC> matrix_, scratch_, spread_, partial_, totals_, ordered_;
};

// Room for eight rows of D elements as they are in global memory, float or half, and as floats.
template <uint32_t D, typename T>
class Vectors {
 public:
  __aicore__ inline void init(TPipe* pipe) {
    pipe->InitBuffer(floats_, kTaskRows * D * sizeof(float));
    if constexpr (sizeof(T) != sizeof(float)) {
      pipe->InitBuffer(elements_, kTaskRows * D * sizeof(T));
    }
  }

  __aicore__ inline LocalTensor<float> floats() { return floats_.Get<float>(); }

  __aicore__ inline LocalTensor<T> elements() {
    if constexpr (sizeof(T) != sizeof(float)) return elements_.template Get<T>();
    else return floats_.template Get<T>();
  }

  // Halves to floats, after they were loaded; nothing for floats.
  __aicore__ inline void widen(uint32_t count) {
    if constexpr (sizeof(T) != sizeof(float)) {
      Cast(floats(), elements(), RoundMode::CAST_NONE, count * D);
      PipeBarrier<PIPE_V>();
    }
  }

  // Floats to halves, before they are stored. CAST_NONE rounds to nearest where it must.
  __aicore__ inline void narrow(uint32_t count) {
    if constexpr (sizeof(T) != sizeof(float)) {
      Cast(elements(), floats(), RoundMode::CAST_NONE, count * D);
    }
  }

 private:
  TBuf<TPosition::VECCALC> floats_, elements_;
};

}  // namespace tq
