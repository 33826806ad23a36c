// TurboQuantEncode for the codec lloyd_max, 4 bits, with norm correction (docs/operators.md): new
// keys or values [B, N, T, D] to rows in the cache [B, N, S, W], in place. Float sums are float32.
//
// A task is up to eight vectors of one head, which every instruction takes together but for the
// rotation's, which take 64 rows of the matrix for one vector. It counts on what the host checked
// (launch.h).
//
// API forms used here that the headers do not list: CompareScalar(uint8_t bits, float, scalar,
// mode, count) with whole 256 bytes, Select(float, bits, float, scalar, VSEL_TENSOR_SCALAR_MODE,
// count), Sqrt, Maxs, Mins, Div with count; Cast of float -> half, half -> uint8_t (CAST_NONE),
// float -> int32_t (CAST_RINT); GetValue and SetValue of local tensors, GetValue of global ones.
// Not compiled with bisheng, not run on an NPU.
#include "tile.h"

namespace tq {

template <uint32_t D, typename T>
class Encode {
 public:
  __aicore__ inline void init(TPipe* pipe, GM_ADDR vectors, GM_ADDR rotation, GM_ADDR centroids,
                              GM_ADDR boundaries, GM_ADDR lengths, GM_ADDR cache,
                              uint32_t past_length, uint32_t batch, uint32_t heads,
                              uint32_t new_tokens, uint32_t capacity) {
    past_length_ = past_length;
    per_sequence_ = lengths != nullptr;
    heads_ = heads;
    new_tokens_ = new_tokens;
    capacity_ = capacity;
    batch_ = batch;
    const uint64_t all_heads = static_cast<uint64_t>(batch) * heads;
    vectors_global_.SetGlobalBuffer((__gm__ T*)vectors, all_heads * new_tokens * D);
    rotation_.SetGlobalBuffer((__gm__ float*)rotation, D * D);
    centroids_global_.SetGlobalBuffer((__gm__ float*)centroids, kLevels);
    boundaries_.SetGlobalBuffer((__gm__ float*)boundaries, kLevels - 1);
    lengths_.SetGlobalBuffer((__gm__ int64_t*)lengths, per_sequence_ ? batch : 0);
    cache_.SetGlobalBuffer((__gm__ uint8_t*)cache, all_heads * capacity * Row<D>::kBytes);
    tile_.init(pipe);
    vectors_.init(pipe);
    store_.init(pipe);
    pipe->InitBuffer(rotated_, kFloats * sizeof(float));
    pipe->InitBuffer(codes_, kFloats * sizeof(float));
    pipe->InitBuffer(bits_, kFloats / 8);
    pipe->InitBuffer(halves_, kFloats / 2 * sizeof(half));
    pipe->InitBuffer(rows_, kTaskRows * Row<D>::kLocalBytes);
    pipe->InitBuffer(centroids_, kLevels * sizeof(float));
    pipe->InitBuffer(norms_, kBlockBytes);
    pipe->InitBuffer(scales_, kBlockBytes);
  }

  __aicore__ inline void process() {
    // Waited for with the first vectors, which are behind them in the pipe.
    DataCopy(centroids_.Get<float>(), centroids_global_, kLevels);
    const uint32_t blocks = (new_tokens_ + kTaskRows - 1) / kTaskRows;
    const uint32_t tasks = batch_ * heads_ * blocks;
    for (uint32_t task = GetBlockIdx(); task < tasks; task += GetBlockNum()) {
      const uint32_t first = task % blocks * kTaskRows;
      const uint32_t left = new_tokens_ - first;
      encode(task / blocks, first, left < kTaskRows ? left : kTaskRows);
    }
  }

 private:
  static constexpr uint32_t kLevels = Row<D>::kLevels;
  static constexpr uint32_t kFloats = kTaskRows * D;
  static constexpr uint32_t kHalf = D / 2;
  static constexpr uint32_t kRowBlocks = Row<D>::kLocalBytes / kBlockBytes;
  static constexpr float kMaxFloat = 3.4028234663852886e38f;
  static constexpr float kTiny = 1e-30f;  // divides zero vectors, below every norm in float32

  // `count` tokens from `first` of sequence and head `head`.
  __aicore__ inline void encode(uint32_t head, uint32_t first, uint32_t count) {
    load(static_cast<uint64_t>(head) * new_tokens_ + first, count);
    const LocalTensor<float> scales = scales_.Get<float>(), norms = norms_.Get<float>();
    sum_squares(scales, vectors_.floats());
    drop_unusable(scales, count);
    Sqrt(norms, scales, kTaskRows);
    PipeBarrier<PIPE_V>();
    Maxs(scales, norms, float{kTiny}, kTaskRows);
    PipeBarrier<PIPE_V>();
    tile_.divide_rows(vectors_.floats(), scales);
    tile_.rotate(rotated_.Get<float>(), vectors_.floats(), rotation_, count);
    quantise();
    correct_norms(scales, norms);
    pack(scales);
    const uint64_t length =
        per_sequence_ ? static_cast<uint64_t>(lengths_.GetValue(head / heads_)) : past_length_;
    store(static_cast<uint64_t>(head) * capacity_ + length + first, count);
  }

  // Rows behind `count` are zero vectors, so that the rest need not know of it.
  __aicore__ inline void load(uint64_t first, uint32_t count) {
    Duplicate(vectors_.floats(), 0.0f, kFloats);
    SetFlag<HardEvent::V_MTE2>(EVENT_ID0);
    WaitFlag<HardEvent::V_MTE2>(EVENT_ID0);
    DataCopy(vectors_.elements(), vectors_global_[first * D], count * D);
    SetFlag<HardEvent::MTE2_V>(EVENT_ID0);
    WaitFlag<HardEvent::MTE2_V>(EVENT_ID0);
    vectors_.widen(count);
  }

  __aicore__ inline void sum_squares(const LocalTensor<float>& sums,
                                     const LocalTensor<float>& rows) {
    Mul(tile_.scratch(), rows, rows, kFloats);
    PipeBarrier<PIPE_V>();
    tile_.reduce_rows(sums, kTaskRows);
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

  // codes = how many boundaries are not above each coordinate, as floats.
  __aicore__ inline void quantise() {
    const LocalTensor<float> rotated = rotated_.Get<float>(), codes = codes_.Get<float>();
    const LocalTensor<float> one = tile_.matrix(), step = tile_.scratch();
    const LocalTensor<uint8_t> bits = bits_.Get<uint8_t>();
    Duplicate(codes, 0.0f, kFloats);
    Duplicate(one, 1.0f, kFloats);
    for (uint32_t k = 0; k + 1 < kLevels; ++k) {
      CompareScalar(bits, rotated, boundaries_.GetValue(k), CMPMODE::GE, kFloats);
      PipeBarrier<PIPE_V>();
      Select(step, bits, one, 0.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, kFloats);
      PipeBarrier<PIPE_V>();
      Add(codes, codes, step, kFloats);
      PipeBarrier<PIPE_V>();
    }
  }

  // scales = norms over those of the centroids that the codes stand for.
  __aicore__ inline void correct_norms(const LocalTensor<float>& scales,
                                       const LocalTensor<float>& norms) {
    const LocalTensor<float> picked = tile_.matrix();
    const LocalTensor<int32_t> offsets = tile_.scratch().template ReinterpretCast<int32_t>();
    Muls(picked, codes_.Get<float>(), static_cast<float>(sizeof(float)), kFloats);
    PipeBarrier<PIPE_V>();
    Cast(offsets, picked, RoundMode::CAST_RINT, kFloats);
    PipeBarrier<PIPE_V>();
    Gather(picked, centroids_.Get<float>(), offsets.ReinterpretCast<uint32_t>(),
           static_cast<uint32_t>(0), kFloats);
    PipeBarrier<PIPE_V>();
    sum_squares(scales, picked);
    Sqrt(scales, scales, kTaskRows);
    PipeBarrier<PIPE_V>();
    Div(scales, norms, scales, kTaskRows);
    PipeBarrier<PIPE_V>();
    Mins(scales, scales, float{spec::kMaxHalf}, kTaskRows);
  }

  // Coordinates i and i + D/2 share byte i, the first in its low bits; the scale goes behind.
  __aicore__ inline void pack(const LocalTensor<float>& scales) {
    const LocalTensor<float> codes = codes_.Get<float>(), high = tile_.scratch();
    const LocalTensor<float> bytes = tile_.matrix();
    const LocalTensor<half> halves = halves_.Get<half>();
    const LocalTensor<uint8_t> rows = rows_.Get<uint8_t>();
    Muls(high, codes, 16.0f, kFloats);
    PipeBarrier<PIPE_V>();
    Add(bytes, codes, high[kHalf], kHalf, kTaskRows,
        {1, 1, 1, kHalf / kBlockFloats, Tile<D>::kStride, Tile<D>::kStride});
    PipeBarrier<PIPE_V>();
    Cast(halves, bytes, RoundMode::CAST_NONE, kFloats / 2);
    PipeBarrier<PIPE_V>();
    SetFlag<HardEvent::MTE3_V>(EVENT_ID0);
    WaitFlag<HardEvent::MTE3_V>(EVENT_ID0);
    Cast(rows, halves, RoundMode::CAST_NONE, kHalf, kTaskRows,
         {1, 1, kRowBlocks, kHalf * sizeof(half) / kBlockBytes});
    tile_.spread(scales, 0, kTaskRows);
    Cast(rows[Row<D>::kCodeBytes].template ReinterpretCast<half>(), tile_.spread(),
         RoundMode::CAST_NONE, kBlockFloats, kTaskRows, {1, 1, kRowBlocks, 1});
  }

  __aicore__ inline void store(uint64_t slot, uint32_t count) {
    store_.prepare(rows_.Get<uint8_t>(), count);
    SetFlag<HardEvent::V_MTE3>(EVENT_ID0);
    WaitFlag<HardEvent::V_MTE3>(EVENT_ID0);
    store_.store(cache_, slot, rows_.Get<uint8_t>(), count);
  }

  uint32_t past_length_, batch_, heads_, new_tokens_, capacity_;
  bool per_sequence_;
  GlobalTensor<T> vectors_global_;
  GlobalTensor<float> rotation_, centroids_global_, boundaries_;
  GlobalTensor<int64_t> lengths_;
  GlobalTensor<uint8_t> cache_;
  Tile<D> tile_;
  Vectors<D, T> vectors_;
  RowStore<D, kTaskRows> store_;
  TBuf<TPosition::VECCALC> rotated_, codes_, bits_, halves_, rows_, centroids_, norms_, scales_;
};

template <uint32_t D, typename T, typename... Args>
__aicore__ inline void run_encode(Args... args) {
  TPipe pipe;
  Encode<D, T> kernel;
  kernel.init(&pipe, args...);
  kernel.process();
}

template <typename T, typename... Args>
__aicore__ inline void encode_of(uint32_t head_size, Args... args) {
  if (head_size == 128) {
    run_encode<128, T>(args...);
  } else if (head_size == 64) {
    run_encode<64, T>(args...);
  }
}

}  // namespace tq

// The entry points, one per element type of the vectors; arguments as in launch.h. They are written
// out, since the build of Ascend reads their names and arguments from here.
extern "C" __global__ __aicore__ void tq_encode_float32(
    GM_ADDR vectors, GM_ADDR rotation, GM_ADDR centroids, GM_ADDR boundaries, GM_ADDR lengths,
    GM_ADDR cache, uint32_t past_length, uint32_t batch, uint32_t heads, uint32_t new_tokens,
    uint32_t capacity, uint32_t head_size) {
  TQ_VECTOR_ONLY();
  tq::encode_of<float>(head_size, vectors, rotation, centroids, boundaries, lengths, cache,
                       past_length, batch, heads, new_tokens, capacity);
}

extern "C" __global__ __aicore__ void tq_encode_float16(
    GM_ADDR vectors, GM_ADDR rotation, GM_ADDR centroids, GM_ADDR boundaries, GM_ADDR lengths,
    GM_ADDR cache, uint32_t past_length, uint32_t batch, uint32_t heads, uint32_t new_tokens,
    uint32_t capacity, uint32_t head_size) {
  TQ_VECTOR_ONLY();
  tq::encode_of<half>(head_size, vectors, rotation, centroids, boundaries, lengths, cache,
                      past_length, batch, heads, new_tokens, capacity);
}
