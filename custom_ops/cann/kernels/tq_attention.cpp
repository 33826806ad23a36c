// TurboQuantDequantAttention, causal, for caches of the codec lloyd_max with 4 bits
// (docs/operators.md): query [B, H, T, D] over key and value cache [B, N, S, W].
//
// A task is up to eight queries that read one KV head: the query group of as many tokens as fit. It
// goes through the cache in tiles of 64 tokens and stays in the rotated space: queries are rotated
// once, sums of values are rotated back once. The softmax is online (online_softmax.h). The rows of
// the next tile are fetched while this one is computed on. Sums are float32. One core reads all of
// a head's cache: a long cache with fewer heads than cores leaves cores idle.
//
// It counts on what the host checked (launch.h).
//
// API forms used here that the headers do not list: Cast of uint8_t -> half, half -> float, float ->
// int32_t (CAST_FLOOR, CAST_RINT), int32_t -> float, float -> half; Gather of half; Mul with count.
// Shifts are not used: 2002 has none.
// Not compiled with bisheng, not run on an NPU.
#include "online_softmax.h"
#include "tile.h"

namespace tq {

template <uint32_t D, typename T>
class Attention {
 public:
  __aicore__ inline void init(TPipe* pipe, GM_ADDR query, GM_ADDR keys, GM_ADDR values,
                              GM_ADDR key_rotation, GM_ADDR key_centroids, GM_ADDR value_rotation,
                              GM_ADDR value_centroids, GM_ADDR lengths, GM_ADDR output,
                              uint32_t past_length, uint32_t batch, uint32_t query_heads,
                              uint32_t heads, uint32_t new_tokens, uint32_t capacity,
                              float scale) {
    past_length_ = past_length;
    per_sequence_ = lengths != nullptr;
    batch_ = batch;
    heads_ = heads;
    group_ = query_heads / heads;
    new_tokens_ = new_tokens;
    capacity_ = capacity;
    scale_ = scale;
    const uint64_t floats = static_cast<uint64_t>(batch) * query_heads * new_tokens * D;
    const uint64_t bytes = static_cast<uint64_t>(batch) * heads * capacity * Row<D>::kBytes;
    query_.SetGlobalBuffer((__gm__ T*)query, floats);
    output_.SetGlobalBuffer((__gm__ T*)output, floats);
    keys_.SetGlobalBuffer((__gm__ uint8_t*)keys, bytes);
    values_.SetGlobalBuffer((__gm__ uint8_t*)values, bytes);
    key_rotation_.SetGlobalBuffer((__gm__ float*)key_rotation, D * D);
    value_rotation_.SetGlobalBuffer((__gm__ float*)value_rotation, D * D);
    key_centroids_global_.SetGlobalBuffer((__gm__ float*)key_centroids, Row<D>::kLevels);
    value_centroids_global_.SetGlobalBuffer((__gm__ float*)value_centroids, Row<D>::kLevels);
    lengths_.SetGlobalBuffer((__gm__ int64_t*)lengths, per_sequence_ ? batch : 0);
    tile_.init(pipe);
    vectors_.init(pipe);
    softmax_.init(pipe);
    pipe->InitBuffer(key_rows_, 2 * kPlace);
    pipe->InitBuffer(value_rows_, 2 * kPlace);
    pipe->InitBuffer(offsets_, kTileRows * D * sizeof(int32_t));
    pipe->InitBuffer(halves_, kTileRows * kHalf * sizeof(half));
    pipe->InitBuffer(rotated_, kTaskRows * D * sizeof(float));
    pipe->InitBuffer(sums_, kTaskRows * D * sizeof(float));
    pipe->InitBuffer(scores_, OnlineSoftmax<D>::kScores * sizeof(float));
    pipe->InitBuffer(scale_offsets_, kTileRows * sizeof(uint32_t));
    pipe->InitBuffer(scale_halves_, kTileRows * sizeof(half));
    pipe->InitBuffer(scales_, kTileRows * sizeof(float));
    pipe->InitBuffer(key_centroids_, Row<D>::kLevels * sizeof(float));
    pipe->InitBuffer(value_centroids_, Row<D>::kLevels * sizeof(float));
  }

  __aicore__ inline void process() {
    // Waited for with the first queries, which are behind them in the pipe.
    DataCopy(key_centroids_.Get<float>(), key_centroids_global_, Row<D>::kLevels);
    DataCopy(value_centroids_.Get<float>(), value_centroids_global_, Row<D>::kLevels);
    const LocalTensor<uint32_t> offsets = scale_offsets_.Get<uint32_t>();
    for (uint32_t t = 0; t < kTileRows; ++t) {
      offsets.SetValue(t, t * Row<D>::kLocalBytes + Row<D>::kLocalScale);
    }
    SetFlag<HardEvent::S_V>(EVENT_ID2);
    WaitFlag<HardEvent::S_V>(EVENT_ID2);
    // Whole groups where they fit.
    const uint32_t step = group_ < kTaskRows ? kTaskRows / group_ * group_ : kTaskRows;
    const uint32_t queries = group_ * new_tokens_;
    const uint32_t blocks = (queries + step - 1) / step;
    const uint32_t tasks = batch_ * heads_ * blocks;
    for (uint32_t task = GetBlockIdx(); task < tasks; task += GetBlockNum()) {
      head_ = task / blocks;
      first_ = task % blocks * step;
      count_ = queries - first_ < step ? queries - first_ : step;
      past_ = per_sequence_ ? static_cast<uint32_t>(lengths_.GetValue(head_ / heads_))
                            : past_length_;
      attend();
    }
  }

 private:
  static constexpr uint32_t kHalf = D / 2;
  static constexpr uint32_t kPlace = kTileRows * Row<D>::kLocalBytes;

  // Query `r` of the task: tokens one after the other, the heads of the group within.
  __aicore__ inline uint32_t token(uint32_t r) { return (first_ + r) / group_; }

  __aicore__ inline uint64_t place(uint32_t r) {
    const uint64_t query_head = static_cast<uint64_t>(head_) * group_ + (first_ + r) % group_;
    return (query_head * new_tokens_ + token(r)) * D;
  }

  // How many of the `count` keys from `first` query `r` sees.
  __aicore__ inline uint32_t visible(uint32_t r, uint32_t first, uint32_t count) {
    const uint32_t end = past_ + token(r) + 1;
    if (end <= first) return 0;
    return end - first < count ? end - first : count;
  }

  __aicore__ inline void attend() {
    load_queries();
    Duplicate(sums_.Get<float>(), 0.0f, kTaskRows * D);
    softmax_.start();
    const uint32_t total = past_ + token(count_ - 1) + 1;
    const uint32_t tiles = (total + kTileRows - 1) / kTileRows;
    fetch(0, total);
    for (uint32_t i = 0; i < tiles; ++i) {
      if (i + 1 < tiles) {
        if (i > 0) WaitFlag<HardEvent::V_MTE2>((i + 1) % 2);
        fetch(i + 1, total);
      }
      const uint32_t first = i * kTileRows;
      WaitFlag<HardEvent::MTE2_V>(i % 2);
      attend(first, total - first < kTileRows ? total - first : kTileRows, i % 2);
      SetFlag<HardEvent::V_MTE2>(i % 2);
    }
    for (uint32_t i = tiles < 2 ? 0 : tiles - 2; i < tiles; ++i) {
      WaitFlag<HardEvent::V_MTE2>(i % 2);
    }
    softmax_.finish(sums_.Get<float>(), tile_);
    store_outputs();
  }

  __aicore__ inline void load_queries() {
    const LocalTensor<float> rotated = rotated_.Get<float>();
    // The outputs of the task before, which the vector unit made, were stored from there.
    SetFlag<HardEvent::MTE3_MTE2>(EVENT_ID2);
    WaitFlag<HardEvent::MTE3_MTE2>(EVENT_ID2);
    for (uint32_t r = 0; r < count_; ++r) {
      DataCopy(vectors_.elements()[r * D], query_[place(r)], D);
    }
    SetFlag<HardEvent::MTE2_V>(EVENT_ID2);
    WaitFlag<HardEvent::MTE2_V>(EVENT_ID2);
    vectors_.widen(count_);
    tile_.rotate(rotated, vectors_.floats(), key_rotation_, count_);
    Muls(rotated, rotated, scale_, count_ * D);
  }

  // Starts to fetch the rows of tile `i`; flags i % 2 say that they are there.
  __aicore__ inline void fetch(uint32_t i, uint32_t total) {
    const uint32_t first = i * kTileRows, left = total - first;
    const uint32_t count = left < kTileRows ? left : kTileRows;
    const uint64_t row = static_cast<uint64_t>(head_) * capacity_ + first;
    load_rows<D>(key_rows_.Get<uint8_t>()[i % 2 * kPlace], keys_, row, count);
    load_rows<D>(value_rows_.Get<uint8_t>()[i % 2 * kPlace], values_, row, count);
    SetFlag<HardEvent::MTE2_V>(i % 2);
  }

  // The `count` tokens from `first`, whose rows are in buffer `which`.
  __aicore__ inline void attend(uint32_t first, uint32_t count, uint32_t which) {
    const LocalTensor<float> scores = scores_.Get<float>(), scales = scales_.Get<float>();
    unpack(key_rows_.Get<uint8_t>()[which * kPlace], key_centroids_.Get<float>(), count);
    Duplicate(scores, float{OnlineSoftmax<D>::kHidden}, OnlineSoftmax<D>::kScores);
    for (uint32_t r = 0; r < count_; ++r) {
      const uint32_t seen = visible(r, first, count);
      if (seen == 0) continue;
      const LocalTensor<float> row = scores[r * kTileRows];
      tile_.dot_rows(row, rotated_.Get<float>()[r * D], seen);
      Mul(row, row, scales, seen);
    }
    PipeBarrier<PIPE_V>();
    softmax_.step(scores, sums_.Get<float>(), tile_);
    unpack(value_rows_.Get<uint8_t>()[which * kPlace], value_centroids_.Get<float>(), count);
    Mul(scores, scores, scales, count, kTaskRows,
        {1, 1, 1, OnlineSoftmax<D>::kStride, OnlineSoftmax<D>::kStride, 0});
    PipeBarrier<PIPE_V>();
    for (uint32_t r = 0; r < count_; ++r) {
      const uint32_t seen = visible(r, first, count);
      if (seen == 0) continue;
      tile_.add_rows(sums_.Get<float>()[r * D], scores, r * kTileRows * sizeof(float), seen);
    }
  }

  // matrix() = centroids of the codes of `count` rows, scales() their scales.
  __aicore__ inline void unpack(const LocalTensor<uint8_t>& rows,
                                const LocalTensor<float>& centroids, uint32_t count) {
    const uint32_t bytes = count * kHalf;
    const LocalTensor<half> halves = halves_.Get<half>();
    const LocalTensor<float> low = tile_.scratch(), high = tile_.scratch()[kTileRows * kHalf];
    const LocalTensor<float> cut = tile_.matrix();
    const LocalTensor<int32_t> offsets = offsets_.Get<int32_t>();
    Gather(scale_halves_.Get<half>(), rows.ReinterpretCast<half>(), scale_offsets_.Get<uint32_t>(),
           static_cast<uint32_t>(0), count);
    Cast(halves, rows, RoundMode::CAST_NONE, kHalf, count,
         {1, 1, kHalf * sizeof(half) / kBlockBytes, Row<D>::kLocalBytes / kBlockBytes});
    PipeBarrier<PIPE_V>();
    Cast(scales_.Get<float>(), scale_halves_.Get<half>(), RoundMode::CAST_NONE, count);
    Cast(low, halves, RoundMode::CAST_NONE, bytes);
    PipeBarrier<PIPE_V>();
    Muls(high, low, 1.0f / 16, bytes);
    PipeBarrier<PIPE_V>();
    Cast(offsets, high, RoundMode::CAST_FLOOR, bytes);
    PipeBarrier<PIPE_V>();
    Cast(high, offsets, RoundMode::CAST_NONE, bytes);
    PipeBarrier<PIPE_V>();
    Muls(cut, high, -16.0f, bytes);
    PipeBarrier<PIPE_V>();
    Add(low, low, cut, bytes);
    PipeBarrier<PIPE_V>();
    Muls(low, low, static_cast<float>(sizeof(float)), bytes);
    Muls(high, high, static_cast<float>(sizeof(float)), bytes);
    PipeBarrier<PIPE_V>();
    Cast(offsets, low, RoundMode::CAST_RINT, kHalf, count,
         {1, 1, Tile<D>::kStride, kHalf / kBlockFloats});
    Cast(offsets[kHalf], high, RoundMode::CAST_RINT, kHalf, count,
         {1, 1, Tile<D>::kStride, kHalf / kBlockFloats});
    PipeBarrier<PIPE_V>();
    Gather(tile_.matrix(), centroids, offsets.ReinterpretCast<uint32_t>(),
           static_cast<uint32_t>(0), count * D);
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void store_outputs() {
    tile_.rotate_back(vectors_.floats(), sums_.Get<float>(), value_rotation_, count_);
    vectors_.narrow(count_);
    SetFlag<HardEvent::V_MTE3>(EVENT_ID2);
    WaitFlag<HardEvent::V_MTE3>(EVENT_ID2);
    for (uint32_t r = 0; r < count_; ++r) {
      DataCopy(output_[place(r)], vectors_.elements()[r * D], D);
    }
  }

  uint32_t past_length_, batch_, heads_, group_, new_tokens_, capacity_;
  uint32_t head_, first_, count_, past_;
  float scale_;
  bool per_sequence_;
  GlobalTensor<T> query_, output_;
  GlobalTensor<uint8_t> keys_, values_;
  GlobalTensor<float> key_rotation_, value_rotation_;
  GlobalTensor<float> key_centroids_global_, value_centroids_global_;
  GlobalTensor<int64_t> lengths_;
  Tile<D> tile_;
  Vectors<D, T> vectors_;
  OnlineSoftmax<D> softmax_;
  TBuf<TPosition::VECCALC> key_rows_, value_rows_, offsets_, halves_, rotated_, sums_, scores_;
  TBuf<TPosition::VECCALC> scale_offsets_, scale_halves_, scales_;
  TBuf<TPosition::VECCALC> key_centroids_, value_centroids_;
};

template <uint32_t D, typename T, typename... Args>
__aicore__ inline void run_attention(Args... args) {
  TPipe pipe;
  Attention<D, T> kernel;
  kernel.init(&pipe, args...);
  kernel.process();
}

template <typename T, typename... Args>
__aicore__ inline void attention_of(uint32_t head_size, Args... args) {
  if (head_size == 128) {
    run_attention<128, T>(args...);
  } else if (head_size == 64) {
    run_attention<64, T>(args...);
  }
}

}  // namespace tq

// The entry points, one per element type of query and output; arguments as in launch.h. They are
// written out, since the build of Ascend reads their names and arguments from here.
extern "C" __global__ __aicore__ void tq_attention_float32(
    GM_ADDR query, GM_ADDR keys, GM_ADDR values, GM_ADDR key_rotation, GM_ADDR key_centroids,
    GM_ADDR value_rotation, GM_ADDR value_centroids, GM_ADDR lengths, GM_ADDR output,
    uint32_t past_length, uint32_t batch, uint32_t query_heads, uint32_t heads,
    uint32_t new_tokens, uint32_t capacity, uint32_t head_size, float scale) {
  TQ_VECTOR_ONLY();
  tq::attention_of<float>(head_size, query, keys, values, key_rotation, key_centroids,
                          value_rotation, value_centroids, lengths, output, past_length, batch,
                          query_heads, heads, new_tokens, capacity, scale);
}

extern "C" __global__ __aicore__ void tq_attention_float16(
    GM_ADDR query, GM_ADDR keys, GM_ADDR values, GM_ADDR key_rotation, GM_ADDR key_centroids,
    GM_ADDR value_rotation, GM_ADDR value_centroids, GM_ADDR lengths, GM_ADDR output,
    uint32_t past_length, uint32_t batch, uint32_t query_heads, uint32_t heads,
    uint32_t new_tokens, uint32_t capacity, uint32_t head_size, float scale) {
  TQ_VECTOR_ONLY();
  tq::attention_of<half>(head_size, query, keys, values, key_rotation, key_centroids,
                         value_rotation, value_centroids, lengths, output, past_length, batch,
                         query_heads, heads, new_tokens, capacity, scale);
}
