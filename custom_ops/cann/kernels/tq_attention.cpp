// TurboQuantDequantAttention, causal, for caches of the codec lloyd_max with 4 bits
// (docs/operators.md): query [B, H, T, D] over key and value cache [B, N, S, W].
//
// A task (attention_tasks.h) goes through the cache in tiles of 64 tokens and stays in the rotated
// space: queries are rotated once, sums of values are rotated back once. The softmax is online
// (online_softmax.h). The rows of the next tile are fetched while this one is computed on. Sums are
// float32.
//
// Where the keys are cut into parts, each part is computed as a whole task is, but for its end: the
// sums, largest scores and weights go to scratch, and tq_attention_merge.cpp makes outputs of them.
// A core takes parts that lie one behind the other, and rotates the queries of a task once for all
// parts of it.
//
// It counts on what the host checked (launch.h).
//
// API forms used here that the headers do not list: Cast of uint8_t -> half, half -> float, float ->
// int32_t (CAST_FLOOR, CAST_RINT), int32_t -> float, float -> half; Gather of half; Mul with count.
// Shifts are not used: 2002 has none.
// Not compiled with bisheng, not run on an NPU.
#include "attention_tasks.h"
#include "online_softmax.h"

namespace tq {

template <uint32_t D, typename T>
class Attention {
 public:
  __aicore__ inline void init(TPipe* pipe, GM_ADDR query, GM_ADDR keys, GM_ADDR values,
                              GM_ADDR key_rotation, GM_ADDR key_centroids, GM_ADDR value_rotation,
                              GM_ADDR value_centroids, GM_ADDR lengths, GM_ADDR output,
                              GM_ADDR scratch, uint32_t past_length, uint32_t batch,
                              uint32_t query_heads, uint32_t heads, uint32_t new_tokens,
                              uint32_t capacity, uint32_t parts, uint32_t part_tokens,
                              float scale) {
    tasks_.init(lengths, scratch, past_length, batch, query_heads, heads, new_tokens, parts,
                part_tokens);
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
    if (tasks_.parts() == 1) {
      for (uint32_t task = GetBlockIdx(); task < tasks_.count(); task += GetBlockNum()) {
        tasks_.choose(task);
        load_queries();
        attend(0);
        store_outputs();
      }
      return;
    }
    const uint64_t all = static_cast<uint64_t>(tasks_.count()) * tasks_.parts();
    const uint32_t first = static_cast<uint32_t>(all * GetBlockIdx() / GetBlockNum());
    const uint32_t end = static_cast<uint32_t>(all * (GetBlockIdx() + 1) / GetBlockNum());
    bool is_loaded = false, is_stored = false;
    for (uint32_t i = first; i < end; ++i) {
      const uint32_t part = i % tasks_.parts();
      if (i == first || part == 0) {
        tasks_.choose(i / tasks_.parts());
        is_loaded = false;
      }
      if (part >= tasks_.parts_with_keys()) continue;
      if (is_stored) WaitFlag<HardEvent::MTE3_V>(EVENT_ID2);
      if (!is_loaded) load_queries();
      is_loaded = true;
      attend(part);
      store_part(part);
      is_stored = true;
    }
    if (is_stored) WaitFlag<HardEvent::MTE3_V>(EVENT_ID2);
  }

 private:
  static constexpr uint32_t kHalf = D / 2;
  static constexpr uint32_t kPlace = kTileRows * Row<D>::kLocalBytes;

  // How many of the `count` keys from `first` query `r` sees.
  __aicore__ inline uint32_t visible(uint32_t r, uint32_t first, uint32_t count) {
    const uint32_t end = tasks_.seen(r);
    if (end <= first) return 0;
    return end - first < count ? end - first : count;
  }

  // Leaves the sums of a part, and in the softmax the largest scores and weights.
  __aicore__ inline void attend(uint32_t part) {
    Duplicate(sums_.Get<float>(), 0.0f, kTaskRows * D);
    softmax_.start();
    const uint32_t begin = tasks_.begin(part), end = tasks_.end(part);
    const uint32_t tiles = (end - begin + kTileRows - 1) / kTileRows;
    fetch(0, begin, end);
    for (uint32_t i = 0; i < tiles; ++i) {
      if (i + 1 < tiles) {
        if (i > 0) WaitFlag<HardEvent::V_MTE2>((i + 1) % 2);
        fetch(i + 1, begin, end);
      }
      const uint32_t first = begin + i * kTileRows;
      WaitFlag<HardEvent::MTE2_V>(i % 2);
      attend(first, end - first < kTileRows ? end - first : kTileRows, i % 2);
      SetFlag<HardEvent::V_MTE2>(i % 2);
    }
    for (uint32_t i = tiles < 2 ? 0 : tiles - 2; i < tiles; ++i) {
      WaitFlag<HardEvent::V_MTE2>(i % 2);
    }
  }

  __aicore__ inline void load_queries() {
    const LocalTensor<float> rotated = rotated_.Get<float>();
    // The outputs of the task before, which the vector unit made, were stored from there.
    SetFlag<HardEvent::MTE3_MTE2>(EVENT_ID2);
    WaitFlag<HardEvent::MTE3_MTE2>(EVENT_ID2);
    for (uint32_t r = 0; r < tasks_.rows(); ++r) {
      DataCopy(vectors_.elements()[r * D], query_[tasks_.place(r)], D);
    }
    SetFlag<HardEvent::MTE2_V>(EVENT_ID2);
    WaitFlag<HardEvent::MTE2_V>(EVENT_ID2);
    vectors_.widen(tasks_.rows());
    tile_.rotate(rotated, vectors_.floats(), key_rotation_, tasks_.rows());
    Muls(rotated, rotated, scale_, tasks_.rows() * D);
  }

  // Starts to fetch the rows of tile `i` of begin .. end; flags i % 2 say that they are there.
  __aicore__ inline void fetch(uint32_t i, uint32_t begin, uint32_t end) {
    const uint32_t first = begin + i * kTileRows, left = end - first;
    const uint32_t count = left < kTileRows ? left : kTileRows;
    const uint64_t row = static_cast<uint64_t>(tasks_.head()) * capacity_ + first;
    load_rows<D>(key_rows_.Get<uint8_t>()[i % 2 * kPlace], keys_, row, count);
    load_rows<D>(value_rows_.Get<uint8_t>()[i % 2 * kPlace], values_, row, count);
    SetFlag<HardEvent::MTE2_V>(i % 2);
  }

  // The `count` tokens from `first`, whose rows are in buffer `which`.
  __aicore__ inline void attend(uint32_t first, uint32_t count, uint32_t which) {
    const LocalTensor<float> scores = scores_.Get<float>(), scales = scales_.Get<float>();
    unpack(key_rows_.Get<uint8_t>()[which * kPlace], key_centroids_.Get<float>(), count);
    Duplicate(scores, float{OnlineSoftmax<D>::kHidden}, OnlineSoftmax<D>::kScores);
    for (uint32_t r = 0; r < tasks_.rows(); ++r) {
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
    for (uint32_t r = 0; r < tasks_.rows(); ++r) {
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
    const uint32_t rows = tasks_.rows();
    softmax_.finish(sums_.Get<float>(), tile_);
    tile_.rotate_back(vectors_.floats(), sums_.Get<float>(), value_rotation_, rows);
    vectors_.narrow(rows);
    SetFlag<HardEvent::V_MTE3>(EVENT_ID2);
    WaitFlag<HardEvent::V_MTE3>(EVENT_ID2);
    for (uint32_t r = 0; r < rows; ++r) {
      DataCopy(output_[tasks_.place(r)], vectors_.elements()[r * D], D);
    }
  }

  // Flag 2 says that the vector unit may write again what is stored from.
  __aicore__ inline void store_part(uint32_t part) {
    SetFlag<HardEvent::V_MTE3>(EVENT_ID2);
    WaitFlag<HardEvent::V_MTE3>(EVENT_ID2);
    DataCopy(tasks_.sums(part), sums_.Get<float>(), kTaskRows * D);
    DataCopy(tasks_.tops(part), softmax_.top(), kTaskRows);
    DataCopy(tasks_.weights(part), softmax_.weight(), kTaskRows);
    SetFlag<HardEvent::MTE3_V>(EVENT_ID2);
  }

  uint32_t capacity_;
  float scale_;
  AttentionTasks<D> tasks_;
  GlobalTensor<T> query_, output_;
  GlobalTensor<uint8_t> keys_, values_;
  GlobalTensor<float> key_rotation_, value_rotation_;
  GlobalTensor<float> key_centroids_global_, value_centroids_global_;
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
    GM_ADDR scratch, uint32_t past_length, uint32_t batch, uint32_t query_heads, uint32_t heads,
    uint32_t new_tokens, uint32_t capacity, uint32_t parts, uint32_t part_tokens,
    uint32_t head_size, float scale) {
  TQ_VECTOR_ONLY();
  tq::attention_of<float>(head_size, query, keys, values, key_rotation, key_centroids,
                          value_rotation, value_centroids, lengths, output, scratch, past_length,
                          batch, query_heads, heads, new_tokens, capacity, parts, part_tokens,
                          scale);
}

extern "C" __global__ __aicore__ void tq_attention_float16(
    GM_ADDR query, GM_ADDR keys, GM_ADDR values, GM_ADDR key_rotation, GM_ADDR key_centroids,
    GM_ADDR value_rotation, GM_ADDR value_centroids, GM_ADDR lengths, GM_ADDR output,
    GM_ADDR scratch, uint32_t past_length, uint32_t batch, uint32_t query_heads, uint32_t heads,
    uint32_t new_tokens, uint32_t capacity, uint32_t parts, uint32_t part_tokens,
    uint32_t head_size, float scale) {
  TQ_VECTOR_ONLY();
  tq::attention_of<half>(head_size, query, keys, values, key_rotation, key_centroids,
                         value_rotation, value_centroids, lengths, output, scratch, past_length,
                         batch, query_heads, heads, new_tokens, capacity, parts, part_tokens,
                         scale);
}
