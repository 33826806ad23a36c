// The rows of one cache on their way into UB, and a tile of them as centroids and scales.
//
// With 4 bits a byte is two codes, and the centroids of the converter's codebooks are small multiples
// of a step, up to 127: a table has the two multiples of each byte as halves, and one Gather looks both
// up.
// Rows then have coordinates i and i + D / 2 as neighbours (tile.h), and the step is in the scales.
//
// Otherwise a plane of w bits has 8 / w codes in a byte; they are taken apart in float: multiply by
// 2^-w, floor, subtract. Shifts are not used: 2002 has none. Codes are kept as byte offsets into the
// centroids, and looked up with Gather.
//
// API forms relied on: Cast of uint8_t -> half and half -> float with a mask of 8 to 64 and strides,
// of float -> int32_t (CAST_FLOOR, CAST_RINT), half -> int32_t (CAST_RINT), half -> float and
// int32_t -> float with count; Muls of half, Adds of int32_t with count; Muls with mask, repeats and
// strides; Gather of half and uint32_t, and of uint16_t on 2002. Not compiled with bisheng, not run
// on an NPU.
#pragma once

#include "tile.h"

namespace tq {

// Two places in UB for the rows of a tile, and the centroids.
template <uint32_t D>
class CachedRows {
 public:
  __aicore__ inline void init(TPipe* pipe, uint64_t rows, const TqAttentionTiling& tiling,
                              uint64_t centroids, uint32_t bits) {
    shape_ = shape_of<D>(bits);
    places_ = places_of(shape_, tiling.heads, tiling.capacity, tiling.overlay_rows);
    rows_global_.SetGlobalBuffer((__gm__ uint8_t*)rows,
                                 places_.lanes(uint64_t{tiling.batch} * tiling.heads));
    centroids_global_.SetGlobalBuffer((__gm__ float*)centroids, shape_.levels);
    pipe->InitBuffer(rows_, 2 * kPlace);
    pipe->InitBuffer(centroids_, kMostLevels * sizeof(float));
    pipe->InitBuffer(multiples_, kPairLevels * 2 * sizeof(half));
    pipe->InitBuffer(pairs_, kPairLevels * kPairLevels * 2 * sizeof(half));
    pipe->InitBuffer(scale_places_, kTileRows * sizeof(uint32_t));
#if __NPU_ARCH__ == 2002
    pipe->InitBuffer(plane_places_, kTileRows * kHalves * sizeof(uint32_t));
#endif
  }

  // Scalar work, which the caller orders before the vector unit (S_V).
  __aicore__ inline void start() {
    const LocalTensor<float> centroids = centroids_.Get<float>();
    for (uint32_t i = 0; i < shape_.levels; ++i) {
      centroids.SetValue(i, shape_.is_signed ? integer_of(i) : centroids_global_.GetValue(i));
    }
    is_paired_ = shape_.levels == kPairLevels && find_multiples();
    const LocalTensor<uint32_t> scales = scale_places_.Get<uint32_t>();
    for (uint32_t t = 0; t < kTileRows; ++t) {
      scales.SetValue(t, t * shape_.scale_stride + shape_.scale);
    }
#if __NPU_ARCH__ == 2002
    if (shape_.planes[1] == 0) return;
    const LocalTensor<uint32_t> places = plane_places_.Get<uint32_t>();
    for (uint32_t i = 0; i < kTileRows * kHalves; ++i) {
      // The bytes after the plane are the scale and are not used here.
      const uint32_t byte = i % kHalves * static_cast<uint32_t>(sizeof(uint16_t));
      const uint32_t kept = byte < shape_.planes[1] ? byte : shape_.planes[1];
      places.SetValue(i, i / kHalves * shape_.loaded + shape_.plane1 + kept);
    }
#endif
  }

  // Starts to fetch `count` rows of a lane from `slot` on to one of the places.
  __aicore__ inline void fetch(uint32_t which, uint32_t lane, uint32_t slot, uint32_t count) {
    load_rows(rows(which), rows_global_, places_, lane, slot, count, shape_);
  }

  // Whether bytes are looked up in pairs(), and the step of the multiples there.
  __aicore__ inline bool is_paired() { return is_paired_; }
  __aicore__ inline float step() { return step_; }

  // The two multiples of every byte, computed by vector instructions on first use. The caller adds
  // the barrier after them.
  __aicore__ inline LocalTensor<uint32_t> pairs() {
    const LocalTensor<int32_t> pairs = pairs_.Get<int32_t>();
    if (is_made_) return pairs.ReinterpretCast<uint32_t>();
    for (uint32_t high = 0; high < kPairLevels; ++high) {
      Adds(pairs[high * kPairLevels], multiples_.Get<int32_t>(), static_cast<int32_t>(highs_[high]),
           kPairLevels);
    }
    is_made_ = true;
    return pairs.ReinterpretCast<uint32_t>();
  }

  __aicore__ inline const RowShape& shape() { return shape_; }
  __aicore__ inline const CachePlaces& places() { return places_; }
  __aicore__ inline const GlobalTensor<uint8_t>& global() { return rows_global_; }
  __aicore__ inline LocalTensor<uint8_t> rows(uint32_t which) {
    return rows_.Get<uint8_t>()[which * kPlace];
  }
  __aicore__ inline LocalTensor<float> centroids() { return centroids_.Get<float>(); }
  __aicore__ inline LocalTensor<uint32_t> scale_places() { return scale_places_.Get<uint32_t>(); }

#if __NPU_ARCH__ == 2002
  static constexpr uint32_t kHalves = kBlockBytes / sizeof(uint16_t);
  __aicore__ inline LocalTensor<uint32_t> plane_places() { return plane_places_.Get<uint32_t>(); }
#endif

 private:
  static constexpr uint32_t kPlace = kTileRows * kMostLoaded<D>;
  static constexpr uint32_t kPairLevels = 16;
  static constexpr int32_t kLargest = 127;   // multiple of the step; half has these exactly
  static constexpr float kRounding = 1e-6f;  // of float32, beside the largest centroid

  // What a code of two's complement is.
  __aicore__ inline float integer_of(uint32_t code) {
    const int32_t levels = static_cast<int32_t>(shape_.levels), number = static_cast<int32_t>(code);
    return static_cast<float>(2 * number < levels ? number : number - levels);
  }

  // multiples_ = those of some step that centroids are, in words of two halves; false where there is
  // no such step. The largest multiples are taken: those of older codebooks are 127, and those of 61
  // are found as 122.
  __aicore__ inline bool find_multiples() {
    if (shape_.is_signed) {
      step_ = 1.0f;
      return set_multiples(1.0f);
    }
    const float largest = centroids_.Get<float>().GetValue(kPairLevels - 1);
    if (!(largest > 0.0f)) return false;
    for (int32_t most = kLargest; most >= static_cast<int32_t>(kPairLevels); --most) {
      step_ = largest / static_cast<float>(most);
      if (set_multiples(largest)) return true;
    }
    return false;
  }

  // The same for one step; begins in the middle, where most steps end.
  __aicore__ inline bool set_multiples(float largest) {
    const LocalTensor<float> centroids = centroids_.Get<float>();
    const LocalTensor<half> multiples = multiples_.Get<half>();
    constexpr float kBound = static_cast<float>(kLargest) + 0.5f;
    for (uint32_t k = 0; k < kPairLevels; ++k) {
      const uint32_t i = (k + kPairLevels / 2) % kPairLevels;
      const float centroid = centroids.GetValue(i), exact = centroid / step_;
      if (!(exact > -kBound && exact < kBound)) return false;
      const float multiple =
          static_cast<float>(static_cast<int32_t>(exact < 0.0f ? exact - 0.5f : exact + 0.5f));
      const float beside = multiple * step_ - centroid;
      if (beside > kRounding * largest || beside < -kRounding * largest) return false;
      multiples.SetValue(2 * i, static_cast<half>(multiple));
      multiples.SetValue(2 * i + 1, static_cast<half>(0.0f));
      highs_[i] = multiples_.Get<uint32_t>().GetValue(i) << 16;
    }
    return true;
  }

  RowShape shape_;
  CachePlaces places_;
  bool is_paired_, is_made_ = false;
  float step_;
  uint32_t highs_[kPairLevels];
  GlobalTensor<uint8_t> rows_global_;
  GlobalTensor<float> centroids_global_;
  TBuf<TPosition::VECCALC> rows_, centroids_, multiples_, pairs_, scale_places_;
#if __NPU_ARCH__ == 2002
  TBuf<TPosition::VECCALC> plane_places_;
#endif
};

template <uint32_t D>
class RowReader {
 public:
  __aicore__ inline void init(TPipe* pipe) {
    pipe->InitBuffer(codes_, kTileRows * D * sizeof(float));
    pipe->InitBuffer(halves_, kTileRows * kHalf * sizeof(half));
    pipe->InitBuffer(scale_halves_, kTileRows * sizeof(half));
    pipe->InitBuffer(scales_, kTileRows * sizeof(float));
    pipe->InitBuffer(pair_, D * sizeof(uint32_t));
    pipe->InitBuffer(part_, D * sizeof(uint32_t));
#if __NPU_ARCH__ == 2002
    pipe->InitBuffer(plane_, kTileRows * kBlockBytes);
#endif
  }

  // Scalar work, which the caller orders before the vector unit (S_V).
  __aicore__ inline void start() {
    const LocalTensor<uint32_t> pair = pair_.Get<uint32_t>(), part = part_.Get<uint32_t>();
    constexpr uint32_t kFloat = sizeof(float);
    for (uint32_t i = 0; i < kHalf; ++i) {
      pair.SetValue(2 * i, i * kFloat);
      pair.SetValue(2 * i + 1, (i + kHalf) * kFloat);
      part.SetValue(i, 2 * i * kFloat);
      part.SetValue(i + kHalf, (2 * i + 1) * kFloat);
    }
  }

  __aicore__ inline LocalTensor<float> scales() { return scales_.Get<float>(); }

  // A tile of floats that is free between two reads.
  __aicore__ inline LocalTensor<float> spare() { return codes_.Get<float>(); }

  // matrix() = centroids of the codes of `count` rows, scales() their scales.
  __aicore__ inline void read(CachedRows<D>& cache, uint32_t which, uint32_t count,
                              Tile<D>& tile) {
    const RowShape& shape = cache.shape();
    const LocalTensor<uint8_t> rows = cache.rows(which);
    if (shape.is_signed) {
      Gather(scales_.Get<float>(), rows.ReinterpretCast<float>(), cache.scale_places(),
             scale_lead(shape, count), count);
    } else {
      Gather(scale_halves_.Get<half>(), rows.ReinterpretCast<half>(), cache.scale_places(),
             static_cast<uint32_t>(0), count);
    }
    widen(rows, shape.loaded, shape.planes[0], count);
    PipeBarrier<PIPE_V>();
    if (!shape.is_signed) {
      Cast(scales_.Get<float>(), scale_halves_.Get<half>(), RoundMode::CAST_NONE, count);
    }
    if (cache.is_paired()) {
      look_up_pairs(cache, shape.planes[0] * count, tile);
      return;
    }
    take_apart(shape.widths[0], shape.planes[0], sizeof(float), true, count, tile);
    if (shape.planes[1] > 0) {
#if __NPU_ARCH__ == 2201
      widen(rows[shape.plane1], shape.loaded, shape.planes[1], count);
#else
      Gather(plane_.Get<uint16_t>(), rows.ReinterpretCast<uint16_t>(), cache.plane_places(),
             static_cast<uint32_t>(0), count * CachedRows<D>::kHalves);
      PipeBarrier<PIPE_V>();
      widen(plane_.Get<uint8_t>(), kBlockBytes, shape.planes[1], count);
#endif
      PipeBarrier<PIPE_V>();
      take_apart(shape.widths[1], shape.planes[1], sizeof(float) << shape.widths[0], false, count,
                 tile);
    }
    const LocalTensor<int32_t> offsets = tile.scratch().template ReinterpretCast<int32_t>();
    Cast(offsets, codes_.Get<float>(), RoundMode::CAST_RINT, count * D);
    PipeBarrier<PIPE_V>();
    Gather(tile.matrix(), cache.centroids(), offsets.ReinterpretCast<uint32_t>(),
           static_cast<uint32_t>(0), count * D);
    PipeBarrier<PIPE_V>();
  }

  // rows[i] = one of `count` rows of halves whose coordinates i and i + D / 2 are neighbours, in order.
  __aicore__ inline void take_pairs(const LocalTensor<float>& rows, const LocalTensor<half>& pairs,
                                    uint32_t count, Tile<D>& tile) {
    const LocalTensor<float> wide = tile.scratch();
    Cast(wide, pairs, RoundMode::CAST_NONE, count * D);
    PipeBarrier<PIPE_V>();
    for (uint32_t r = 0; r < count; ++r) {
      Gather(rows[r * D], wide[r * D], part_.Get<uint32_t>(), static_cast<uint32_t>(0), D);
    }
  }

 private:
  static constexpr uint32_t kHalf = D / 2;

  // matrix() = the multiples of the codes in `bytes` halves, and the step goes to the scales.
  __aicore__ inline void look_up_pairs(CachedRows<D>& cache, uint32_t bytes, Tile<D>& tile) {
    const LocalTensor<half> halves = halves_.Get<half>();
    const LocalTensor<int32_t> offsets = tile.scratch().template ReinterpretCast<int32_t>();
    const LocalTensor<uint32_t> pairs = cache.pairs(), found = codes_.Get<uint32_t>();
    Muls(halves, halves, static_cast<half>(static_cast<float>(sizeof(uint32_t))), bytes);
    PipeBarrier<PIPE_V>();
    Cast(offsets, halves, RoundMode::CAST_RINT, bytes);
    Muls(scales(), scales(), cache.step(), bytes / kHalf);
    PipeBarrier<PIPE_V>();
    Gather(found, pairs, offsets.ReinterpretCast<uint32_t>(), static_cast<uint32_t>(0), bytes);
    PipeBarrier<PIPE_V>();
    Cast(tile.paired_matrix(pair_.Get<uint32_t>(), part_.Get<uint32_t>()),
         found.ReinterpretCast<half>(), RoundMode::CAST_NONE, 2 * bytes);
  }

  // Blocks of a row of `size` halves, a whole block at least.
  __aicore__ inline uint32_t half_blocks(uint32_t size) {
    return (size * static_cast<uint32_t>(sizeof(half)) + kBlockBytes - 1) / kBlockBytes;
  }

  // halves_ = `size` bytes of each row.
  __aicore__ inline void widen(const LocalTensor<uint8_t>& rows, uint32_t place, uint32_t size,
                               uint32_t count) {
    Cast(halves_.Get<half>(), rows, RoundMode::CAST_NONE, size, static_cast<uint8_t>(count),
         {1, 1, static_cast<uint8_t>(half_blocks(size)),
          static_cast<uint8_t>(place / kBlockBytes)});
  }

  // codes_ = (or += where it is not the first plane) `unit` times the codes in halves_.
  __aicore__ inline void take_apart(uint32_t width, uint32_t size, uint32_t unit, bool is_first,
                                    uint32_t count, Tile<D>& tile) {
    const uint8_t rows = static_cast<uint8_t>(count);
    const uint8_t blocks = static_cast<uint8_t>(size / kBlockFloats);
    const uint32_t bytes = count * size, fields = 8 / width;
    const LocalTensor<float> codes = codes_.Get<float>();
    const LocalTensor<float> cut = tile.matrix()[kTileRows * kHalf];
    const LocalTensor<int32_t> whole = tile.matrix().template ReinterpretCast<int32_t>();
    LocalTensor<float> low = tile.scratch(), high = tile.scratch()[kTileRows * kHalf];
    Cast(low, halves_.Get<half>(), RoundMode::CAST_NONE, size, rows,
         {1, 1, blocks, static_cast<uint8_t>(half_blocks(size))});
    PipeBarrier<PIPE_V>();
    Muls(low, low, static_cast<float>(unit), bytes);
    PipeBarrier<PIPE_V>();
    for (uint32_t k = 0; k + 1 < fields; ++k) {
      const float base = static_cast<float>(unit << width);
      Muls(high, low, 1.0f / base, bytes);
      PipeBarrier<PIPE_V>();
      Cast(whole, high, RoundMode::CAST_FLOOR, bytes);
      PipeBarrier<PIPE_V>();
      Cast(high, whole, RoundMode::CAST_NONE, bytes);
      PipeBarrier<PIPE_V>();
      Muls(cut, high, -base, bytes);
      if (is_first && k + 2 == fields) {
        Muls(codes[(k + 1) * size], high, static_cast<float>(unit), size, rows,
             {1, 1, Tile<D>::kStride, blocks});
      } else {
        Muls(high, high, static_cast<float>(unit), bytes);
      }
      PipeBarrier<PIPE_V>();
      if (is_first) {
        Add(codes[k * size], low, cut, size, rows, {1, 1, 1, Tile<D>::kStride, blocks, blocks});
      } else {
        Add(low, low, cut, bytes);
        PipeBarrier<PIPE_V>();
        add_field(k * size, low, size, rows, blocks);
      }
      const LocalTensor<float> next = high;
      high = low;
      low = next;
    }
    if (!is_first) add_field((fields - 1) * size, low, size, rows, blocks);
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void add_field(uint32_t place, const LocalTensor<float>& field, uint32_t size,
                                   uint8_t rows, uint8_t blocks) {
    const LocalTensor<float> codes = codes_.Get<float>()[place];
    Add(codes, codes, field, size, rows,
        {1, 1, 1, Tile<D>::kStride, Tile<D>::kStride, blocks});
  }

  TBuf<TPosition::VECCALC> codes_, halves_, scale_halves_, scales_, pair_, part_;
#if __NPU_ARCH__ == 2002
  TBuf<TPosition::VECCALC> plane_;
#endif
};

}  // namespace tq
