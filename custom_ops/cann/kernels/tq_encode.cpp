// TurboQuantEncode for the codecs lloyd_max with 1 to 5 bits and uniform_signed (docs/operators.md): new keys or values
// [B, N, T, D] to rows in the cache [B, N, S, W], in place. Float sums are float32.
//
// A task is up to eight vectors of one head, which every instruction takes together but for the
// rotation's, which take 64 rows of the matrix for one vector. With gains each is tried on all
// vectors of a task; which was the best so far is kept by vector, without the scalar unit. A single
// vector, as in a decode step, is tried with eight gains at a time. It counts on what the host
// checked (tiling.h).
//
// Codes are counted up boundary by boundary: what is below one keeps its code, the rest get the
// next. Comparisons of all boundaries come first, as none depends on another.
//
// API forms used here that the headers do not list: CompareScalar(uint8_t bits, float, scalar,
// mode, count) with whole 256 bytes, modes LT and GE; Select(float, bits, float, scalar,
// VSEL_TENSOR_SCALAR_MODE, count), in place; Sqrt, Max, Maxs, Mins, Div, Sub with count; Cast of
// float -> half and half -> uint8_t (CAST_NONE) with a mask of 8 to 64, float -> int32_t
// (CAST_FLOOR), int32_t -> float; GetValue and SetValue of local tensors, GetValue of global ones.
// Not compiled with bisheng, not run on an NPU.
#include "entry_writer.h"
#include "slot_offsets.h"
#include "tile.h"

namespace tq {

template <uint32_t D, typename T>
class Encode {
 public:
  __aicore__ inline void init(TPipe* pipe, const TqEncodeTiling& tiling) {
    tiling_ = tiling;
    per_sequence_ = tiling.lengths != 0;
    shape_ = shape_of<D>(tiling.bits);
    const uint64_t all_heads = static_cast<uint64_t>(tiling.batch) * tiling.heads;
    vectors_global_.SetGlobalBuffer((__gm__ T*)tiling.vectors, all_heads * tiling.new_tokens * D);
    rotation_.SetGlobalBuffer((__gm__ float*)tiling.rotation, D * D);
    lengths_.SetGlobalBuffer((__gm__ int64_t*)tiling.lengths, per_sequence_ ? tiling.batch : 0);
    const CachePlaces places =
        places_of(shape_, tiling.heads, tiling.capacity, tiling.overlay_rows);
    cache_.SetGlobalBuffer((__gm__ uint8_t*)tiling.cache, places.lanes(all_heads));
    read(centroids_, tiling.centroids, shape_.levels);
    for (uint32_t i = 0; i < shape_.levels; ++i) {
      stored_codes_[i] = static_cast<float>((i + shape_.levels / 2) % shape_.levels);
    }
    read(boundaries_, tiling.boundaries, shape_.levels - 1);
    gain_count_ = tiling.gains == 0 ? 0 : tiling.gain_count;
    read(gains_, tiling.gains, gain_count_);
    tile_.init(pipe);
    vectors_.init(pipe);
    store_.init(pipe, shape_, places, tiling.new_tokens);
    entries_.init(pipe, {tiling.recent, tiling.sinks}, places);
    offsets_.init(pipe, tiling.offset, tiling.offset_rows, tiling.heads);
    pipe->InitBuffer(rotated_, kFloats * sizeof(float));
    pipe->InitBuffer(scaled_, kFloats * sizeof(float));
    pipe->InitBuffer(codes_, kFloats * sizeof(float));
    pipe->InitBuffer(bits_, (kMostLevels - 1) * kBits);
    pipe->InitBuffer(halves_, kTaskRows * (D / 2) * sizeof(half));
    pipe->InitBuffer(rows_, kTaskRows * kMostStored<D>);
    pipe->InitBuffer(norms_, kBlockBytes);
    pipe->InitBuffer(scales_, kBlockBytes);
    pipe->InitBuffer(products_, kBlockBytes);
    pipe->InitBuffer(squares_, kBlockBytes);
    pipe->InitBuffer(most_, kBlockBytes);
    pipe->InitBuffer(behind_, kLanes * sizeof(float));
    pipe->InitBuffer(best_, kLanes * sizeof(float));
  }

  __aicore__ inline void process() {
    const uint32_t blocks = (tiling_.new_tokens + kTaskRows - 1) / kTaskRows;
    const uint32_t tasks = tiling_.batch * tiling_.heads * blocks;
    const uint32_t cores = cores_of_launch();
    if (GetBlockIdx() >= cores) return;
    if (entries_.is_on()) clear_tags(cores);
    // On 2002 a core takes all tasks of a head: neighbours share a line of 32 bytes.
    const uint32_t run = __NPU_ARCH__ == 2002 ? blocks : 1;
    for (uint32_t first = GetBlockIdx() * run; first < tasks; first += cores * run) {
      for (uint32_t task = first; task < first + run; ++task) {
        const uint32_t token = task % blocks * kTaskRows, left = tiling_.new_tokens - token;
        encode(task / blocks, token, left < kTaskRows ? left : kTaskRows);
      }
    }
  }

 private:
  static constexpr uint32_t kFloats = kTaskRows * D;
  static constexpr uint32_t kBits = kFloats / 8;  // bytes of one comparison
  static constexpr uint32_t kMostGains = spec::kMaxGains;
  static constexpr uint32_t kNormKept = 1, kUnbiased = 2;
  static constexpr float kMaxFloat = 3.4028234663852886e38f;
  static constexpr float kTiny = 1e-30f;  // divides zero vectors, below every norm in float32

  // A table that the scalar unit hands to instructions.
  __aicore__ inline void read(float* values, uint64_t table, uint32_t count) {
    GlobalTensor<float> global;
    global.SetGlobalBuffer((__gm__ float*)table, count);
    for (uint32_t i = 0; i < count; ++i) values[i] = global.GetValue(i);
  }

  __aicore__ inline uint64_t length_of(uint32_t head) {
    if (!per_sequence_) return tiling_.past_length;
    return static_cast<uint64_t>(lengths_.GetValue(head / tiling_.heads));
  }

  // How many of the cores work: on 2002 one where the end of a head and the beginning of the next, in
  // one line of 32 bytes, may both be written.
  __aicore__ inline uint32_t cores_of_launch() {
    const uint32_t cores = static_cast<uint32_t>(GetBlockNum());
#if __NPU_ARCH__ == 2002
    const uint64_t head_bytes = static_cast<uint64_t>(tiling_.capacity) * shape_.bytes;
    const uint32_t end = tiling_.overlay_rows + tiling_.past_length + tiling_.new_tokens;
    if (shape_.has_planes) return is_apart(end) ? cores : 1;
    const bool are_lines = tiling_.cache % kBlockBytes == 0 && head_bytes % kBlockBytes == 0;
    const bool has_gap = (tiling_.past_length > 0 && !entries_.is_on()) || end < tiling_.capacity;
    if (!are_lines && (per_sequence_ || !has_gap)) return 1;
#endif
    return cores;
  }

#if __NPU_ARCH__ == 2002
  // Whether no two heads touch one line in planes. Of fewer than eight tokens the eight scales before
  // them are loaded, and some stored, which begin before a head of fewer.
  __aicore__ inline bool is_apart(uint32_t end) {
    constexpr uint32_t kApart = 2 * kBlockFloats;  // tokens
    const uint64_t row = shape_.bytes, heads = tiling_.heads;
    const uint64_t slots = tiling_.capacity - tiling_.overlay_rows;
    const uint64_t overlay = tiling_.overlay_rows * row, codes = heads * slots * row;
    const uint64_t sequence = codes + heads * overlay;
    const bool are_lines =
        (tiling_.cache % kBlockBytes | sequence % kBlockBytes) == 0 &&
        (!entries_.is_on() || (overlay % kBlockBytes | codes % kBlockBytes) == 0);
    if (entries_.is_on() && !are_lines) return false;
    const uint32_t past = per_sequence_ ? 0 : tiling_.past_length;
    const bool is_inside = tiling_.new_tokens >= kTaskRows || past >= kTaskRows;
    if (are_lines && slots % kBlockFloats == 0 && is_inside) return true;
    return !per_sequence_ && (past >= kApart || end + kApart <= tiling_.capacity);
  }

#endif
  __aicore__ inline void clear_tags(uint32_t cores) {
    const uint32_t heads = tiling_.batch * tiling_.heads;
    for (uint32_t head = GetBlockIdx(); head < heads; head += cores) {
      if (length_of(head) == 0) entries_.clear(tile_, cache_, head, tiling_.new_tokens);
    }
  }

  // `count` tokens from `first` of sequence and head `head`.
  __aicore__ inline void encode(uint32_t head, uint32_t first, uint32_t count) {
    const uint64_t length = length_of(head);
    load(head, first, length + first, count);
    const LocalTensor<float> scales = scales_.Get<float>(), norms = norms_.Get<float>();
    const LocalTensor<float> rotated = rotated_.Get<float>();
    Mul(tile_.scratch(), vectors_.floats(), vectors_.floats(), kFloats);
    PipeBarrier<PIPE_V>();
    tile_.reduce_rows(scales, kTaskRows);
    drop_unusable(scales, count);
    Sqrt(norms, scales, kTaskRows);
    PipeBarrier<PIPE_V>();
    Maxs(scales, norms, float{kTiny}, kTaskRows);
    PipeBarrier<PIPE_V>();
    tile_.divide_rows(vectors_.floats(), scales);
    tile_.rotate(rotated, vectors_.floats(), rotation_, count);
    if (gain_count_ > 0 && count > 1) search(rotated, count);
    if (gain_count_ > 0 && count == 1) search_of_one(rotated);
    correct(scales, norms, gain_count_ > 0 ? scaled_.Get<float>() : rotated, rotated, count);
    count_up(codes_.Get<float>(), shape_.is_signed ? stored_codes_ : nullptr, count);
    pack(scales, count);
    store(head, length + first, count);
  }

  // Rows behind `count` are zero vectors, so that norms need not know of it.
  __aicore__ inline void load(uint32_t head, uint32_t first, uint64_t slot, uint32_t count) {
    Duplicate(vectors_.floats(), 0.0f, kFloats);
    SetFlag<HardEvent::V_MTE2>(EVENT_ID0);
    WaitFlag<HardEvent::V_MTE2>(EVENT_ID0);
    const uint64_t row = static_cast<uint64_t>(head) * tiling_.new_tokens + first;
    DataCopy(vectors_.elements(), vectors_global_[row * D], count * D);
    if (offsets_.is_given()) {
      for (uint32_t r = 0; r < count; ++r) offsets_.load(tile_.matrix()[r * D], slot + r, head);
    }
    SetFlag<HardEvent::MTE2_V>(EVENT_ID0);
    WaitFlag<HardEvent::MTE2_V>(EVENT_ID0);
    vectors_.widen(count);
    if (entries_.is_on()) {
      const uint32_t token = static_cast<uint32_t>(slot);
      entries_.write(tile_, vectors_.floats(), cache_, head, token, count,
                     token - first + tiling_.new_tokens);
    }
    if (!offsets_.is_given()) return;
    Sub(vectors_.floats(), vectors_.floats(), tile_.matrix(), count * D);
    PipeBarrier<PIPE_V>();
  }

  // A vector whose squared norm is not finite is encoded as the zero vector.
  __aicore__ inline void drop_unusable(const LocalTensor<float>& squares, uint32_t count) {
    SetFlag<HardEvent::V_S>(EVENT_ID0);
    WaitFlag<HardEvent::V_S>(EVENT_ID0);
    for (uint32_t r = 0; r < count; ++r) {
      if (squares.GetValue(r) <= kMaxFloat) continue;  // false for NaN
      squares.SetValue(r, 0.0f);
      Duplicate(vectors_.floats()[r * D], 0.0f, D);
    }
    SetFlag<HardEvent::S_V>(EVENT_ID0);
    WaitFlag<HardEvent::S_V>(EVENT_ID0);
  }

  // bits_ = which coordinates are below each boundary; `count_up` waits for them.
  __aicore__ inline void compare(const LocalTensor<float>& numbers, uint32_t count) {
    const LocalTensor<uint8_t> bits = bits_.Get<uint8_t>();
    for (uint32_t k = 0; k + 1 < shape_.levels; ++k) {
      CompareScalar(bits[k * kBits], numbers, float{boundaries_[k]}, CMPMODE::LT, count * D);
    }
  }

  // chosen[i] = the entry of a table by the code of coordinate i, as bits_ have them; the codes
  // themselves without a table.
  __aicore__ inline void count_up(const LocalTensor<float>& chosen, const float* table,
                                  uint32_t count) {
    const LocalTensor<uint8_t> bits = bits_.Get<uint8_t>();
    Duplicate(chosen, table == nullptr ? 0.0f : table[0], count * D);
    PipeBarrier<PIPE_V>();
    for (uint32_t k = 0; k + 1 < shape_.levels; ++k) {
      const float next = table == nullptr ? static_cast<float>(k + 1) : table[k + 1];
      Select(chosen, bits[k * kBits], chosen, next, SELMODE::VSEL_TENSOR_SCALAR_MODE, count * D);
      PipeBarrier<PIPE_V>();
    }
  }

  __aicore__ inline void sum_products(const LocalTensor<float>& sums, const LocalTensor<float>& a,
                                      const LocalTensor<float>& b, uint32_t count) {
    Mul(tile_.scratch(), a, b, count * D);
    PipeBarrier<PIPE_V>();
    tile_.reduce_rows(sums, count);
  }

  // products_ and squares_ of the centroids that numbers are coded as.
  __aicore__ inline void attempt(const LocalTensor<float>& numbers,
                                 const LocalTensor<float>& rotated, uint32_t count) {
    const LocalTensor<float> picked = tile_.matrix();
    compare(numbers, count);
    count_up(picked, centroids_, count);
    sum_products(products_.Get<float>(), picked, rotated, count);
    sum_products(squares_.Get<float>(), picked, picked, count);
  }

  // products_ = how good numbers are: <u, c>^2 / <c, c>, the more the better.
  __aicore__ inline void rate(const LocalTensor<float>& numbers, const LocalTensor<float>& rotated,
                              uint32_t count) {
    const LocalTensor<float> product = products_.Get<float>(), square = squares_.Get<float>();
    attempt(numbers, rotated, count);
    // Where scales have either sign, so have products.
    if (!shape_.is_signed) Maxs(product, product, 0.0f, count);
    Maxs(square, square, float{kTiny}, count);
    PipeBarrier<PIPE_V>();
    Mul(product, product, product, count);
    PipeBarrier<PIPE_V>();
    Div(product, product, square, count);
    PipeBarrier<PIPE_V>();
  }

  // scaled_ = vectors times the best of the gains; of several that are as good the first.
  __aicore__ inline void search(const LocalTensor<float>& rotated, uint32_t count) {
    const LocalTensor<float> scaled = scaled_.Get<float>(), best = best_.Get<float>();
    const LocalTensor<float> product = products_.Get<float>();
    const LocalTensor<float> most = most_.Get<float>(), behind = behind_.Get<float>();
    const LocalTensor<uint8_t> bits = bits_.Get<uint8_t>();
    Duplicate(most, -1.0f, kTaskRows);
    Duplicate(behind, 0.0f, kLanes);
    Duplicate(best, float{gains_[0]}, kLanes);
    for (uint32_t k = 0; k < gain_count_; ++k) {
      Muls(scaled, rotated, float{gains_[k]}, count * D);
      PipeBarrier<PIPE_V>();
      rate(scaled, rotated, count);
      Sub(behind, most, product, count);
      PipeBarrier<PIPE_V>();
      CompareScalar(bits, behind, 0.0f, CMPMODE::GE, kLanes);
      Max(most, most, product, count);
      PipeBarrier<PIPE_V>();
      Select(best, bits, best, float{gains_[k]}, SELMODE::VSEL_TENSOR_SCALAR_MODE, kLanes);
      PipeBarrier<PIPE_V>();
    }
    tile_.spread(best, 0, kTaskRows);
    for (uint32_t c = 0; c < Tile<D>::kChunks; ++c) {
      Mul(scaled[c * kLanes], rotated[c * kLanes], tile_.spread(), kLanes,
          static_cast<uint8_t>(count), {1, 1, 0, Tile<D>::kStride, Tile<D>::kStride, 1});
    }
    PipeBarrier<PIPE_V>();
  }

  // The same of one vector: rows are the vector times kTaskRows gains.
  __aicore__ inline void search_of_one(const LocalTensor<float>& rotated) {
    const LocalTensor<float> scaled = scaled_.Get<float>(), product = products_.Get<float>();
    for (uint32_t r = 1; r < kTaskRows; ++r) Adds(rotated[r * D], rotated, 0.0f, D);
    float best = gains_[0], most = -1.0f;
    for (uint32_t first = 0; first < gain_count_; first += kTaskRows) {
      const uint32_t left = gain_count_ - first, count = left < kTaskRows ? left : kTaskRows;
      for (uint32_t r = 0; r < count; ++r) Muls(scaled[r * D], rotated, float{gains_[first + r]}, D);
      PipeBarrier<PIPE_V>();
      rate(scaled, rotated, count);
      SetFlag<HardEvent::V_S>(EVENT_ID0);
      WaitFlag<HardEvent::V_S>(EVENT_ID0);
      for (uint32_t r = 0; r < count; ++r) {
        const float rating = product.GetValue(r);
        if (rating <= most) continue;
        most = rating;
        best = gains_[first + r];
      }
    }
    Muls(scaled, rotated, best, D);
    PipeBarrier<PIPE_V>();
  }

  // scales = norms, and what makes up for the centroids that numbers are coded as.
  __aicore__ inline void correct(const LocalTensor<float>& scales, const LocalTensor<float>& norms,
                                 const LocalTensor<float>& numbers,
                                 const LocalTensor<float>& rotated, uint32_t count) {
    const LocalTensor<float> product = products_.Get<float>(), square = squares_.Get<float>();
    attempt(numbers, rotated, count);
    if (shape_.is_signed) return correct_signed(scales, norms, count);
    if (tiling_.norm_correction == kNormKept) {
      Sqrt(square, square, count);
      PipeBarrier<PIPE_V>();
      Div(scales, norms, square, count);
    } else if (tiling_.norm_correction == kUnbiased) {
      // Codes that say nothing of the vector have no scale: the factor is 0 for them, else 1.
      Maxs(product, product, 0.0f, count);
      Duplicate(scales, 1.0f, kTaskRows);
      PipeBarrier<PIPE_V>();
      Muls(square, product, 1.0f / kTiny, count);
      Maxs(product, product, float{kTiny}, count);
      PipeBarrier<PIPE_V>();
      Mins(square, square, 1.0f, count);
      Div(scales, scales, product, count);
      PipeBarrier<PIPE_V>();
      Mul(square, square, norms, count);
      PipeBarrier<PIPE_V>();
      Mul(scales, scales, square, count);
    } else {
      Adds(scales, norms, 0.0f, count);
    }
    PipeBarrier<PIPE_V>();
    Mins(scales, scales, float{spec::kMaxHalf}, count);
  }

  // The same of either sign, in steps: norms times p / p^2, p / |p| / |c| or p / |p|, p = <u, c>.
  __aicore__ inline void correct_signed(const LocalTensor<float>& scales,
                                        const LocalTensor<float>& norms, uint32_t count) {
    const LocalTensor<float> product = products_.Get<float>(), square = squares_.Get<float>();
    const LocalTensor<float> divisor = most_.Get<float>();
    Mul(divisor, product, product, count);
    PipeBarrier<PIPE_V>();
    if (tiling_.norm_correction != kUnbiased) {
      Sqrt(divisor, divisor, count);
      PipeBarrier<PIPE_V>();
    }
    if (tiling_.norm_correction == kNormKept) {
      Sqrt(square, square, count);
      PipeBarrier<PIPE_V>();
      Mul(divisor, divisor, square, count);
      PipeBarrier<PIPE_V>();
    }
    Maxs(divisor, divisor, float{kTiny}, count);
    PipeBarrier<PIPE_V>();
    Div(scales, product, divisor, count);
    PipeBarrier<PIPE_V>();
    Mul(scales, scales, norms, count);
    PipeBarrier<PIPE_V>();
    Muls(scales, scales, float{centroids_[shape_.levels / 2 + 1]}, count);
  }

  // Codes to bytes, plane by plane, and behind them the scale.
  __aicore__ inline void pack(const LocalTensor<float>& scales, uint32_t count) {
    const LocalTensor<float> codes = codes_.Get<float>(), high = scaled_.Get<float>();
    const LocalTensor<uint8_t> rows = rows_.Get<uint8_t>();
    SetFlag<HardEvent::MTE3_V>(EVENT_ID0);
    WaitFlag<HardEvent::MTE3_V>(EVENT_ID0);
    if (shape_.planes[1] > 0) {
      const LocalTensor<float> cut = tile_.matrix();
      const LocalTensor<int32_t> whole = tile_.scratch().template ReinterpretCast<int32_t>();
      const float base = static_cast<float>(1u << shape_.widths[0]);
      Muls(cut, codes, 1.0f / base, count * D);
      PipeBarrier<PIPE_V>();
      Cast(whole, cut, RoundMode::CAST_FLOOR, count * D);
      PipeBarrier<PIPE_V>();
      Cast(high, whole, RoundMode::CAST_NONE, count * D);
      PipeBarrier<PIPE_V>();
      Muls(cut, high, -base, count * D);
      PipeBarrier<PIPE_V>();
      Add(codes, codes, cut, count * D);
      pack_plane(rows[shape_.head], high, 1, count);
    }
    pack_plane(rows, codes, 0, count);
    if (shape_.has_planes) return Muls(store_.scales(), scales, 1.0f, kTaskRows);
    tile_.spread(scales, 0, kTaskRows);
    if (shape_.is_signed) {
      Muls(rows[shape_.scale_block].template ReinterpretCast<float>(), tile_.spread(), 1.0f,
           kBlockFloats, static_cast<uint8_t>(count),
           {1, 1, static_cast<uint8_t>(shape_.stored / kBlockBytes), 1});
      return;
    }
    Cast(rows[shape_.scale_block].template ReinterpretCast<half>(), tile_.spread(),
         RoundMode::CAST_NONE, kBlockFloats, static_cast<uint8_t>(count),
         {1, 1, static_cast<uint8_t>(shape_.stored / kBlockBytes), 1});
  }

  // Byte i of a plane of n bytes has code i + k n from bit k * width on.
  __aicore__ inline void pack_plane(const LocalTensor<uint8_t>& rows,
                                    const LocalTensor<float>& codes, uint32_t plane,
                                    uint32_t count) {
    const uint32_t size = shape_.planes[plane], width = shape_.widths[plane];
    const uint8_t repeats = static_cast<uint8_t>(count);
    const uint8_t blocks = static_cast<uint8_t>(size / kBlockFloats);
    const LocalTensor<float> bytes = tile_.matrix(), shifted = tile_.scratch();
    const LocalTensor<half> halves = halves_.Get<half>();
    for (uint32_t k = 1; k < 8 / width; ++k) {
      Muls(shifted, codes, static_cast<float>(1u << k * width), count * D);
      PipeBarrier<PIPE_V>();
      if (k == 1) {
        Add(bytes, codes, shifted[size], size, repeats,
            {1, 1, 1, blocks, Tile<D>::kStride, Tile<D>::kStride});
      } else {
        Add(bytes, bytes, shifted[k * size], size, repeats,
            {1, 1, 1, blocks, blocks, Tile<D>::kStride});
      }
      PipeBarrier<PIPE_V>();
    }
    const uint8_t half_blocks =
        static_cast<uint8_t>((size * sizeof(half) + kBlockBytes - 1) / kBlockBytes);
    Cast(halves, bytes, RoundMode::CAST_NONE, size, repeats, {1, 1, half_blocks, blocks});
    PipeBarrier<PIPE_V>();
    Cast(rows, halves, RoundMode::CAST_NONE, size, repeats,
         {1, 1, static_cast<uint8_t>(shape_.stored / kBlockBytes), half_blocks});
  }

  __aicore__ inline void store(uint32_t head, uint64_t slot, uint32_t count) {
    store_.prepare(rows_.Get<uint8_t>(), count);
    SetFlag<HardEvent::V_MTE3>(EVENT_ID0);
    WaitFlag<HardEvent::V_MTE3>(EVENT_ID0);
    store_.store(cache_, head, slot, rows_.Get<uint8_t>(), count);
  }

  TqEncodeTiling tiling_;
  uint32_t gain_count_;
  bool per_sequence_;
  RowShape shape_;
  float stored_codes_[kMostLevels];  // of two's complement, by the levels from the lowest on
  float centroids_[kMostLevels], boundaries_[kMostLevels], gains_[kMostGains];
  GlobalTensor<T> vectors_global_;
  GlobalTensor<float> rotation_;
  GlobalTensor<int64_t> lengths_;
  GlobalTensor<uint8_t> cache_;
  Tile<D> tile_;
  Vectors<D, T> vectors_;
  RowStore store_;
  EntryWriter<D> entries_;
  SlotOffsets<D> offsets_;
  TBuf<TPosition::VECCALC> rotated_, scaled_, codes_, bits_, halves_, rows_, norms_, scales_;
  TBuf<TPosition::VECCALC> products_, squares_, most_, behind_, best_;
};

}  // namespace tq

// The entry points, one per element type.
extern "C" __global__ __vector__ __aicore__ void tq_encode_float32(TqEncodeTiling tiling) {
  tq::run_sized<tq::Encode, float>(tiling);
}

extern "C" __global__ __vector__ __aicore__ void tq_encode_float16(TqEncodeTiling tiling) {
  tq::run_sized<tq::Encode, half>(tiling);
}
