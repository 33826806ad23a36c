// Transpose (docs/operators.md): x [batch, rows, columns, bytes] to y [batch, columns, rows,
// bytes].
//
// A task is a tile of some rows and some columns, as near to a square as it goes. Rows of the tile
// come in one by one, its columns go out one by one, each with one transfer: only in UB are their
// elements apart, so that no stride depends on the sizes of x. There are two places for tiles, so
// that one comes in while the other goes out. The vector unit has nothing to do.
//
// It counts on what the host checked (tiling.h).
//
// API forms relied on: DataCopy(local, global, count), and DataCopy(global, local, DataCopyParams)
// with up to 2,048 blocks of data, their lengths and gaps in blocks of 32 bytes; flags between the
// two transfer pipes. Not compiled with bisheng, not run on an NPU.
#include "double_buffer.h"

namespace tq {

class Transpose {
 public:
  __aicore__ inline void init(TPipe* pipe, const TqTransposeTiling& tiling) {
    batch_ = tiling.batch;
    rows_ = tiling.rows;
    columns_ = tiling.columns;
    bytes_ = tiling.bytes;
    const uint64_t all = static_cast<uint64_t>(batch_) * rows_ * columns_ * bytes_;
    x_.SetGlobalBuffer((__gm__ uint8_t*)tiling.x, all);
    y_.SetGlobalBuffer((__gm__ uint8_t*)tiling.y, all);
    pipe->InitBuffer(tiles_, 2 * kTileBytes);
  }

  __aicore__ inline void process() {
    choose_tile();
    const uint32_t down = (rows_ - 1) / high_ + 1, across = (columns_ - 1) / wide_ + 1;
    const uint32_t tasks = batch_ * down * across;
    for (uint32_t i = 0; i < 2; ++i) SetFlag<HardEvent::MTE3_MTE2>(i);
    uint32_t which = 0;
    for (uint32_t task = GetBlockIdx(); task < tasks; task += GetBlockNum()) {
      move(task / (down * across), task / across % down * high_, task % across * wide_, which);
      which = 1 - which;
    }
    for (uint32_t i = 0; i < 2; ++i) WaitFlag<HardEvent::MTE3_MTE2>(i);
  }

 private:
  static constexpr uint32_t kTileBytes = 65536;  // one element at least

  // high_ and wide_ are powers of 2, so that sides of tensors that are, too, are whole tiles.
  __aicore__ inline void choose_tile() {
    const uint32_t most = share(batch_ * rows_ * columns_, 1, kTileBytes / bytes_);
    while (2 * high_ * wide_ <= most && (high_ < rows_ || wide_ < columns_)) {
      if (wide_ >= columns_ || (high_ < rows_ && high_ <= wide_)) high_ *= 2;
      else wide_ *= 2;
    }
  }

  // The tile from `row` and `column` on, by way of place `which`.
  __aicore__ inline void move(uint32_t matrix, uint32_t row, uint32_t column, uint32_t which) {
    const uint32_t high = rows_ - row < high_ ? rows_ - row : high_;
    const uint32_t wide = columns_ - column < wide_ ? columns_ - column : wide_;
    const LocalTensor<uint8_t> tile = tiles_.Get<uint8_t>()[which * kTileBytes];
    const uint64_t first_row = static_cast<uint64_t>(matrix) * rows_ + row;
    const uint64_t first_column = static_cast<uint64_t>(matrix) * columns_ + column;
    WaitFlag<HardEvent::MTE3_MTE2>(which);
    for (uint32_t r = 0; r < high; ++r) {
      DataCopy(tile[r * wide * bytes_], x_[((first_row + r) * columns_ + column) * bytes_],
               wide * bytes_);
    }
    SetFlag<HardEvent::MTE2_MTE3>(which);
    WaitFlag<HardEvent::MTE2_MTE3>(which);
    const DataCopyParams shape{static_cast<uint16_t>(high),
                               static_cast<uint16_t>(bytes_ / kBlockBytes),
                               static_cast<uint16_t>((wide - 1) * bytes_ / kBlockBytes), 0};
    for (uint32_t c = 0; c < wide; ++c) {
      DataCopy(y_[((first_column + c) * rows_ + row) * bytes_], tile[c * bytes_], shape);
    }
    SetFlag<HardEvent::MTE3_MTE2>(which);
  }

  uint32_t batch_, rows_, columns_, bytes_;
  uint32_t high_ = 1, wide_ = 1;
  GlobalTensor<uint8_t> x_, y_;
  TBuf<TPosition::VECCALC> tiles_;
};

}  // namespace tq

extern "C" __global__ __vector__ __aicore__ void tq_transpose(TqTransposeTiling tiling) {
  tq::run<tq::Transpose>(tiling);
}
