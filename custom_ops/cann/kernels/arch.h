// What differs between the Ascend architectures: 2201 (910B, 910C) and 2002 (310P).
//
// Rows of the cache are not a multiple of 32 bytes, which is the unit in which data moves between
// global memory and the unified buffer (UB).
//
//   2201  DataCopyPad moves blocks of any length: one instruction for all rows of a tile. GM -> UB
//         it starts each block on a new 32 bytes; UB -> GM it skips what is behind a block.
//   2002  has no DataCopyPad. DataCopy moves multiples of 32 bytes from and to any byte address of
//         global memory, so a row is moved as its codes and, once more, its last 32 bytes: the
//         pieces overlap and hold the same bytes there, nothing beside the row is touched.
//
// API forms relied on: DataCopyPad(local, global, DataCopyExtParams, DataCopyPadExtParams) and
// DataCopyPad(global, local, DataCopyExtParams) on 2201; DataCopy(local, global, count) and
// DataCopy(global, local, count) with global addresses that are not aligned, and Gather of
// uint16_t, on 2002. Nothing here was compiled with bisheng or run on an NPU.
#pragma once

#include "kernel_operator.h"
#include "tq/codec_spec.h"

#if !defined(__NPU_ARCH__)
#error "__NPU_ARCH__ is not defined: these kernels are for 2201 and 2002"
#elif __NPU_ARCH__ == 2201
#define TQ_VECTOR_ONLY() KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY)
#elif __NPU_ARCH__ == 2002
#define TQ_VECTOR_ONLY() static_assert(true, "cores of 2002 are not divided")
#else
#error "these kernels are for __NPU_ARCH__ 2201 and 2002"
#endif

namespace tq {

using namespace AscendC;

constexpr uint32_t kBlockBytes = 32;  // unit of addresses in UB, and of strides
constexpr uint32_t kBlockFloats = 8;  // floats of one block
constexpr uint32_t kLanes = 64;       // floats of one repeat

// Layout of a row in the cache (from the generated header) and of its place in UB: the codes, and
// a block that has the scale in it.
template <uint32_t D>
struct Row {
  static constexpr spec::Codec kCodec{spec::Kind::kLloydMax, 4};
  static constexpr uint32_t kLevels = spec::levels(kCodec);
  static constexpr uint32_t kCodeBytes = spec::code_bytes(kCodec, D);
  static constexpr uint32_t kBytes = spec::row_bytes(kCodec, D);
  static constexpr uint32_t kLocalBytes = kCodeBytes + kBlockBytes;
  static constexpr uint32_t kTail = kBytes - kBlockBytes;  // where the last 32 bytes begin
#if __NPU_ARCH__ == 2201
  static constexpr uint32_t kLocalScale = kCodeBytes;
#else
  static constexpr uint32_t kLocalScale = kLocalBytes - (kBytes - kCodeBytes);
#endif
  static_assert(spec::planes(kCodec).count == 1 && spec::planes(kCodec).plane[0].width == 4,
                "the kernels unpack two codes of a byte by hand");
  static_assert(kBytes == kCodeBytes + sizeof(half), "one float16 behind the codes");
  static_assert(kCodeBytes % kBlockBytes == 0, "codes fill whole blocks of UB");
};

// Loads `count` rows, the first of which is at `first`, to places of kLocalBytes each.
template <uint32_t D>
__aicore__ inline void load_rows(const LocalTensor<uint8_t>& rows,
                                 const GlobalTensor<uint8_t>& cache, uint64_t first,
                                 uint32_t count) {
#if __NPU_ARCH__ == 2201
  const DataCopyExtParams shape{static_cast<uint16_t>(count), Row<D>::kBytes, 0, 0, 0};
  const DataCopyPadExtParams<uint8_t> padding{false, 0, 0, 0};
  DataCopyPad(rows, cache[first * Row<D>::kBytes], shape, padding);
#else
  for (uint32_t r = 0; r < count; ++r) {
    const uint64_t row = (first + r) * Row<D>::kBytes;
    const uint32_t place = r * Row<D>::kLocalBytes;
    DataCopy(rows[place], cache[row], Row<D>::kCodeBytes);
    DataCopy(rows[place + Row<D>::kCodeBytes], cache[row + Row<D>::kTail], kBlockBytes);
  }
#endif
}

// Stores rows whose places hold the codes and, at kCodeBytes, the scale.
template <uint32_t D, uint32_t ROWS>
class RowStore {
 public:
  // What it writes as scalars, the caller orders before the vector unit (S_V).
  __aicore__ inline void init(TPipe* pipe) {
#if __NPU_ARCH__ == 2002
    pipe->InitBuffer(tails_, ROWS * kBlockBytes);
    pipe->InitBuffer(offsets_, ROWS * kHalves * sizeof(uint32_t));
    const LocalTensor<uint32_t> offsets = offsets_.Get<uint32_t>();
    for (uint32_t i = 0; i < ROWS * kHalves; ++i) {
      offsets.SetValue(i, i / kHalves * Row<D>::kLocalBytes + Row<D>::kTail +
                              i % kHalves * static_cast<uint32_t>(sizeof(uint16_t)));
    }
#else
    (void)pipe;
#endif
  }

  // Vector work that `store` needs; the rows were written by the vector unit.
  __aicore__ inline void prepare(const LocalTensor<uint8_t>& rows, uint32_t count) {
#if __NPU_ARCH__ == 2002
    PipeBarrier<PIPE_V>();
    Gather(tails_.Get<uint16_t>(), rows.ReinterpretCast<uint16_t>(), offsets_.Get<uint32_t>(),
           static_cast<uint32_t>(0), count * kHalves);
#else
    (void)rows;
    (void)count;
#endif
  }

  __aicore__ inline void store(const GlobalTensor<uint8_t>& cache, uint64_t first,
                               const LocalTensor<uint8_t>& rows, uint32_t count) {
#if __NPU_ARCH__ == 2201
    const DataCopyExtParams shape{static_cast<uint16_t>(count), Row<D>::kBytes, 0, 0, 0};
    DataCopyPad(cache[first * Row<D>::kBytes], rows, shape);
#else
    const LocalTensor<uint8_t> tails = tails_.Get<uint8_t>();
    for (uint32_t r = 0; r < count; ++r) {
      const uint64_t row = (first + r) * Row<D>::kBytes;
      DataCopy(cache[row], rows[r * Row<D>::kLocalBytes], Row<D>::kCodeBytes);
      DataCopy(cache[row + Row<D>::kTail], tails[r * kBlockBytes], kBlockBytes);
    }
#endif
  }

 private:
#if __NPU_ARCH__ == 2002
  static constexpr uint32_t kHalves = kBlockBytes / sizeof(uint16_t);
  static_assert(Row<D>::kTail % sizeof(uint16_t) == 0, "a tail is gathered in pairs of bytes");
  TBuf<TPosition::VECCALC> tails_, offsets_;
#endif
};

}  // namespace tq
