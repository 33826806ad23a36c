// What differs between the Ascend architectures: 2201 (910B, 910C) and 2002 (310P).
//
// Rows of the cache are not a multiple of 32 bytes, which is the unit in which data moves between
// global memory and the unified buffer (UB).
//
//   2201  DataCopyPad moves blocks of any length: one instruction for all rows of a tile. GM -> UB
//         it starts each block on a new 32 bytes; UB -> GM it skips what is behind a block.
//   2002  has no DataCopyPad. DataCopy moves multiples of 32 bytes from and to any byte address of
//         global memory, so a row is read as its first plane and, once more, its last 32 bytes.
//         Neighbouring rows are stored together, and of those the last 32 bytes once more: both
//         hold the same bytes there. Rows of fewer than 32 bytes cannot be moved so. Stores that
//         share a line of 32 bytes need PipeBarrier<PIPE_MTE3> between them, and two cores may not
//         share one. What is in planes is whole lines, but for scales of four bytes: fewer than
//         eight are stored with those of the tokens before.
//
// API forms relied on: DataCopyPad(local, global, DataCopyExtParams, DataCopyPadExtParams),
// DataCopyPad(global, local, DataCopyExtParams) and Brcb(dst, src, repeats, {dstBlkStride,
// dstRepStride}) of float on 2201; DataCopy(local, global, count) and
// DataCopy(global, local, count) with global addresses that are not aligned, and Gather of
// uint16_t, on 2002. Nothing here was compiled with bisheng or run on an NPU.
#pragma once

#include "cache_places.h"
#include "kernel_operator.h"
#include "tiling.h"
#include "tq/codec_spec.h"

#if !defined(__NPU_ARCH__) || (__NPU_ARCH__ != 2201 && __NPU_ARCH__ != 2002)
#error "these kernels are for __NPU_ARCH__ 2201 and 2002"
#endif

namespace tq {

using namespace AscendC;

constexpr uint32_t kBlockBytes = 32;  // unit of addresses in UB, and of strides
constexpr uint32_t kBlockFloats = 8;  // floats of one block
constexpr uint32_t kLanes = 64;       // floats of one repeat
constexpr uint32_t kTileRows = 64;    // a row of their scores is one repeat
constexpr uint32_t kTaskRows = 8;     // vectors of a task: what one reduction by blocks leaves

template <class Kernel, class Tiling>
__aicore__ inline void run(const Tiling& tiling) {
  TPipe pipe;
  Kernel kernel;
  kernel.init(&pipe, tiling);
  kernel.process();
}

// A kernel that is compiled for each head size.
template <template <uint32_t, typename> class Kernel, typename T, class Tiling>
__aicore__ inline void run_sized(const Tiling& tiling) {
  if (tiling.head_size == 128) {
    run<Kernel<128, T>>(tiling);
  } else if (tiling.head_size == 64) {
    run<Kernel<64, T>>(tiling);
  }
}

// A row of lloyd_max or uniform_signed: the bit planes of its codes and its scale (tq/codec_spec.h),
// and their places in UB. Bytes.
struct RowShape {
  uint32_t bits, levels;
  bool is_signed;        // codes are integers in two's complement, the scale is a float
  bool has_planes;       // the codes of all rows lie together, and so do the scales
  uint32_t scale_bytes;
  uint32_t widths[2], planes[2];  // bits of a code in a plane, and its size; 0 without a second one
  uint32_t bytes;                 // of the row in the cache
  // Loaded: plane 0 in whole blocks, and a block of 32 bytes with what is behind it.
  uint32_t head, loaded, plane1, scale, scale_stride;
  // To be stored: plane 0, plane 1 and the scale, each at the beginning of a block.
  uint32_t stored, scale_block;
};

// The constants of it. They are members because functions of tq/codec_spec.h are the host's: device
// functions may not call them.
template <uint32_t D, int BITS, spec::Kind KIND>
struct RowConstants {
  static constexpr spec::Codec kCodec{KIND, BITS};
  static constexpr bool kIsSigned = KIND == spec::Kind::kUniformSigned;
  static constexpr uint32_t kScale = kIsSigned ? sizeof(float) : sizeof(half);
  static constexpr spec::Planes kPlanes = spec::planes(kCodec);
  static constexpr uint32_t kLevels = spec::levels(kCodec);
  static constexpr uint32_t kFirstWidth = kPlanes.plane[0].width;
  static constexpr uint32_t kFirst = spec::plane_bytes(kFirstWidth, D);
  static constexpr uint32_t kSecondWidth = kPlanes.count > 1 ? kPlanes.plane[1].width : 0;
  static constexpr uint32_t kSecond = kSecondWidth == 0 ? 0 : spec::plane_bytes(kSecondWidth, D);
  static constexpr uint32_t kBytes = spec::row_bytes(kCodec, D);
  static constexpr uint32_t kHead = (kFirst + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
  static_assert(kPlanes.count <= 2 && kPlanes.plane[0].shift == 0 &&
                    (kPlanes.count == 1 || kPlanes.plane[1].shift == kPlanes.plane[0].width),
                "the kernels know one plane or two");
  static_assert(kBytes == kFirst + kSecond + kScale, "one scale behind the planes");
  static_assert(kSecond + kScale <= kBlockBytes, "it is in a block with the second plane");
  static_assert(kHead <= D / 2, "no plane is larger than that of 4 bits");
};

template <uint32_t D, int BITS, spec::Kind KIND = spec::Kind::kLloydMax>
__aicore__ inline RowShape shape_of_bits() {
  using Row = RowConstants<D, BITS, KIND>;
  RowShape shape{};
  shape.bits = BITS;
  shape.is_signed = Row::kIsSigned;
  shape.scale_bytes = Row::kScale;
  shape.levels = Row::kLevels;
  shape.widths[0] = Row::kFirstWidth;
  shape.widths[1] = Row::kSecondWidth;
  shape.planes[0] = Row::kFirst;
  shape.planes[1] = Row::kSecond;
  shape.bytes = Row::kBytes;
  shape.head = Row::kHead;
  shape.loaded = shape.head + kBlockBytes;
#if __NPU_ARCH__ == 2201
  shape.plane1 = shape.head;
#else
  shape.plane1 = shape.head + kBlockBytes - shape.scale_bytes - shape.planes[1];
#endif
  shape.scale = shape.plane1 + shape.planes[1];
  shape.scale_block = shape.head + (shape.planes[1] == 0 ? 0 : kBlockBytes);
  shape.stored = shape.scale_block + kBlockBytes;
  shape.scale_stride = shape.loaded;
  return shape;
}

template <uint32_t D>
__aicore__ inline RowShape shape_of_rows(uint32_t bits) {
  switch (bits) {
    case 1:
      return shape_of_bits<D, 1>();
    case 2:
      return shape_of_bits<D, 2>();
    case 3:
      return shape_of_bits<D, 3>();
    case 4:
      return shape_of_bits<D, 4>();
    case kTqSignedBits + 3:
      return shape_of_bits<D, 3, spec::Kind::kUniformSigned>();
    case kTqSignedBits + 4:
      return shape_of_bits<D, 4, spec::Kind::kUniformSigned>();
    default:
      return shape_of_bits<D, 5>();
  }
}

// In planes codes are whole blocks, one behind the other, and behind those of a tile are its scales.
template <uint32_t D>
__aicore__ inline RowShape shape_of(uint32_t bits) {
  if (bits < kTqPlanes) return shape_of_rows<D>(bits);
  RowShape shape = shape_of_rows<D>(bits - kTqPlanes);
  shape.has_planes = true;
  shape.loaded = shape.stored = shape.head;
  shape.scale = kTileRows * shape.head;
  shape.scale_stride = shape.scale_bytes;
  return shape;
}

// Copies of the `count` floats from byte `base` of `from`, a whole block each; `count` is a multiple
// of 8, and `base` of 32. 2002 has no instruction for it, and looks floats up for each block.
class Spread {
 public:
  __aicore__ inline void init(TPipe* pipe, uint32_t most) {
#if __NPU_ARCH__ == 2002
    pipe->InitBuffer(places_, most * kBlockBytes);
    const LocalTensor<int32_t> places = places_.Get<int32_t>();
    for (uint32_t i = 0; i < most; ++i) {
      Duplicate(places[i * kBlockFloats], static_cast<int32_t>(i * sizeof(float)), kBlockFloats);
    }
#else
    (void)pipe;
    (void)most;
#endif
  }

  __aicore__ inline void copy(const LocalTensor<float>& to, const LocalTensor<float>& from,
                              uint32_t base, uint32_t count) {
#if __NPU_ARCH__ == 2002
    Gather(to, from, places_.Get<int32_t>().ReinterpretCast<uint32_t>(), base,
           count * kBlockFloats);
#else
    Brcb(to, from[base / static_cast<uint32_t>(sizeof(float))],
         static_cast<uint8_t>(count / kBlockFloats), {1, kBlockFloats});
#endif
  }

#if __NPU_ARCH__ == 2002
 private:
  TBuf<TPosition::VECCALC> places_;
#endif
};

// The most of any bits.
constexpr uint32_t kMostLevels = 32;
template <uint32_t D>
constexpr uint32_t kMostLoaded = D / 2 + kBlockBytes;
template <uint32_t D>
constexpr uint32_t kMostStored = D / 2 + 2 * kBlockBytes;

__aicore__ inline CachePlaces places_of(const RowShape& shape, uint32_t heads, uint32_t capacity,
                                        uint32_t overlay_rows) {
  const uint32_t tokens = capacity - overlay_rows;
  return {heads, tokens, overlay_rows, shape.bytes, shape.scale_bytes, shape.has_planes};
}

// Bytes in front of the scales of `count` rows in planes that 2002 loads with them, so that what it
// reads ends where they do.
__aicore__ inline uint32_t scale_lead(const RowShape& shape, uint32_t count) {
#if __NPU_ARCH__ == 2002
  if (shape.has_planes) return (kBlockFloats - count % kBlockFloats) % kBlockFloats * shape.scale_bytes;
#else
  (void)shape;
  (void)count;
#endif
  return 0;
}

// Loads the rows of `count` tokens of a lane, from `slot` on, to places of shape.loaded each.
__aicore__ inline void load_rows(const LocalTensor<uint8_t>& rows,
                                 const GlobalTensor<uint8_t>& cache, const CachePlaces& places,
                                 uint32_t lane, uint32_t slot, uint32_t count,
                                 const RowShape& shape) {
  const uint64_t first = places.row(lane, slot);
#if __NPU_ARCH__ == 2201
  const DataCopyPadExtParams<uint8_t> padding{false, 0, 0, 0};
  const uint16_t rows_in = static_cast<uint16_t>(count);
  if (shape.has_planes) {
    DataCopyPad(rows, cache[first], DataCopyExtParams{1, count * shape.loaded, 0, 0, 0}, padding);
    DataCopyPad(rows[shape.scale], cache[places.scale(lane, slot)],
                DataCopyExtParams{1, count * shape.scale_bytes, 0, 0, 0}, padding);
    return;
  }
  if (shape.planes[0] == shape.head) {
    const DataCopyExtParams whole{rows_in, shape.bytes, 0, 0, 0};
    DataCopyPad(rows, cache[first], whole, padding);
    return;
  }
  const uint32_t rest = shape.bytes - shape.planes[0];
  const DataCopyExtParams plane{rows_in, shape.planes[0], rest, 1, 0};
  const DataCopyExtParams behind{rows_in, rest, shape.planes[0], shape.head / kBlockBytes, 0};
  DataCopyPad(rows, cache[first], plane, padding);
  DataCopyPad(rows[shape.head], cache[first + shape.planes[0]], behind, padding);
#else
  if (shape.has_planes) {
    const uint32_t lead = scale_lead(shape, count);
    DataCopy(rows, cache[first], count * shape.loaded);
    DataCopy(rows[shape.scale], cache[places.scale(lane, slot) - lead],
             count * shape.scale_bytes + lead);
    return;
  }
  for (uint32_t r = 0; r < count; ++r) {
    const uint64_t row = first + static_cast<uint64_t>(r) * shape.bytes;
    const uint32_t place = r * shape.loaded;
    DataCopy(rows[place], cache[row], shape.head);
    DataCopy(rows[place + shape.head], cache[row + shape.bytes - kBlockBytes], kBlockBytes);
  }
#endif
}

// Loads `bytes`, whole blocks, of each of `count` places in a cache, the first of which is at `first`
// and each of which is `stride` bytes behind the one before.
__aicore__ inline void load_pieces(const LocalTensor<uint8_t>& to,
                                   const GlobalTensor<uint8_t>& cache, uint64_t first,
                                   uint32_t count, uint32_t bytes, uint32_t stride) {
#if __NPU_ARCH__ == 2201
  const DataCopyPadExtParams<uint8_t> padding{false, 0, 0, 0};
  const DataCopyExtParams pieces{static_cast<uint16_t>(count), bytes, stride - bytes, 0, 0};
  DataCopyPad(to, cache[first], pieces, padding);
#else
  for (uint32_t i = 0; i < count; ++i) {
    DataCopy(to[i * bytes], cache[first + static_cast<uint64_t>(i) * stride], bytes);
  }
#endif
}

// Stores the rows of up to eight tokens from places of shape.stored each.
class RowStore {
 public:
  // What it writes as scalars, the caller orders before the vector unit (S_V).
  __aicore__ inline void init(TPipe* pipe, const RowShape& shape, const CachePlaces& places,
                              uint32_t most_rows) {
    shape_ = shape;
    places_ = places;
    pipe->InitBuffer(scales_, 2 * kBlockBytes);
#if __NPU_ARCH__ == 2002
    pipe->InitBuffer(tail_, kBlockBytes);
    pipe->InitBuffer(line_, kBlockBytes / kHalf * sizeof(uint32_t));
    const LocalTensor<uint32_t> line = line_.Get<uint32_t>();
    for (uint32_t i = 0; i < kBlockBytes / kHalf; ++i) line.SetValue(i, i * kHalf);
    if (shape.has_planes) return;
    const uint32_t most = most_rows < kTaskRows ? most_rows : kTaskRows;
    const uint32_t halves = shape.bytes / kHalf;
    pipe->InitBuffer(image_, kTaskRows * shape.stored);
    pipe->InitBuffer(offsets_, kTaskRows * halves * sizeof(uint32_t));
    const LocalTensor<uint32_t> offsets = offsets_.Get<uint32_t>();
    for (uint32_t r = 0; r < most; ++r) {
      for (uint32_t i = 0; i < halves; ++i) {
        offsets.SetValue(r * halves + i, r * shape.stored + place(i * kHalf));
      }
    }
#else
    (void)most_rows;
#endif
  }

  // Where the scales are put in planes.
  __aicore__ inline LocalTensor<float> scales() { return scales_.Get<float>()[kBlockFloats]; }

  // Vector work that `store` needs; the rows were written by the vector unit.
  __aicore__ inline void prepare(const LocalTensor<uint8_t>& rows, uint32_t count) {
#if __NPU_ARCH__ == 2002
    if (shape_.has_planes) return;
    PipeBarrier<PIPE_V>();
    const LocalTensor<uint16_t> image = image_.Get<uint16_t>();
    Gather(image, rows.ReinterpretCast<uint16_t>(), offsets_.Get<uint32_t>(),
           static_cast<uint32_t>(0), count * shape_.bytes / kHalf);
    PipeBarrier<PIPE_V>();
    Gather(tail_.Get<uint16_t>(), image, line_.Get<uint32_t>(), count * shape_.bytes - kBlockBytes,
           kBlockBytes / kHalf);
#else
    (void)rows;
    (void)count;
#endif
  }

  __aicore__ inline void store(const GlobalTensor<uint8_t>& cache, uint32_t lane, uint64_t slot,
                               const LocalTensor<uint8_t>& rows, uint32_t count) {
    const uint64_t first = places_.row(lane, slot);
#if __NPU_ARCH__ == 2201
    if (shape_.has_planes) {
      const uint32_t bytes = count * shape_.scale_bytes;
      DataCopyPad(cache[first], rows, DataCopyExtParams{1, count * shape_.stored, 0, 0, 0});
      DataCopyPad(cache[places_.scale(lane, slot)], scales().ReinterpretCast<uint8_t>(),
                  DataCopyExtParams{1, bytes, 0, 0, 0});
      return;
    }
    if (shape_.planes[0] == shape_.head && shape_.planes[1] == 0) {
      piece(cache, first, rows, count, 0, 0, shape_.bytes);
      return;
    }
    const uint32_t codes = shape_.bytes - shape_.scale_bytes;
    piece(cache, first, rows, count, 0, 0, shape_.planes[0]);
    if (shape_.planes[1] > 0) {
      piece(cache, first, rows, count, shape_.planes[0], shape_.head, shape_.planes[1]);
    }
    piece(cache, first, rows, count, codes, shape_.scale_block, shape_.scale_bytes);
#else
    if (shape_.has_planes) {
      DataCopy(cache[first], rows, count * shape_.stored);
      return store_scales(cache, places_.scale(lane, slot), count);
    }
    const uint32_t bytes = count * shape_.bytes, whole = bytes / kBlockBytes * kBlockBytes;
    DataCopy(cache[first], image_.Get<uint8_t>(), whole);
    if (whole == bytes) return;
    PipeBarrier<PIPE_MTE3>();
    DataCopy(cache[first + bytes - kBlockBytes], tail_.Get<uint8_t>(), kBlockBytes);
#endif
  }

 private:
#if __NPU_ARCH__ == 2201
  // `bytes` of every row, from `from` of its place to `to` of the row.
  __aicore__ inline void piece(const GlobalTensor<uint8_t>& cache, uint64_t first,
                               const LocalTensor<uint8_t>& rows, uint32_t count, uint32_t to,
                               uint32_t from, uint32_t bytes) {
    const uint32_t blocks = (bytes + kBlockBytes - 1) / kBlockBytes;
    const DataCopyExtParams shape{static_cast<uint16_t>(count), bytes,
                                  shape_.stored / kBlockBytes - blocks, shape_.bytes - bytes, 0};
    DataCopyPad(cache[first + to], rows[from], shape);
  }
#else
  static constexpr uint32_t kHalf = sizeof(uint16_t);

  // Eight at least: fewer behind those of the tokens before, or behind whatever is there before the
  // first ones.
  __aicore__ inline void store_scales(const GlobalTensor<uint8_t>& cache, uint64_t to,
                                      uint32_t count) {
    const uint32_t bytes = count * shape_.scale_bytes;
    SetFlag<HardEvent::MTE3_MTE2>(EVENT_ID0);
    WaitFlag<HardEvent::MTE3_MTE2>(EVENT_ID0);
    if (count < kTaskRows) DataCopy(scales_.Get<uint8_t>(), cache[to - kBlockBytes], kBlockBytes);
    SetFlag<HardEvent::MTE2_V>(EVENT_ID0);
    WaitFlag<HardEvent::MTE2_V>(EVENT_ID0);
    Gather(tail_.Get<uint16_t>(), scales_.Get<uint16_t>(), line_.Get<uint32_t>(), bytes,
           kBlockBytes / kHalf);
    SetFlag<HardEvent::V_MTE3>(EVENT_ID0);
    WaitFlag<HardEvent::V_MTE3>(EVENT_ID0);
    DataCopy(cache[to + bytes - kBlockBytes], tail_.Get<uint8_t>(), kBlockBytes);
  }

  // Where byte `byte` of a row is in its place.
  __aicore__ inline uint32_t place(uint32_t byte) {
    if (byte < shape_.planes[0]) return byte;
    const uint32_t behind = byte - shape_.planes[0];
    if (behind < shape_.planes[1]) return shape_.head + behind;
    return shape_.scale_block + behind - shape_.planes[1];
  }

  TBuf<TPosition::VECCALC> image_, tail_, offsets_, line_;
#endif
  RowShape shape_;
  CachePlaces places_;
  TBuf<TPosition::VECCALC> scales_;
};

}  // namespace tq
