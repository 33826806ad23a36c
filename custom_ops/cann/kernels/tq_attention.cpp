// TurboQuantDequantAttention, causal, for caches of the codecs lloyd_max and uniform_signed, each with
// its own number (docs/operators.md): query [B, H, T, D] over key and value cache [B, N, S, W].
//
// A task (attention_tasks.h) goes through the cache in tiles of 64 tokens and stays in the rotated
// space: queries are rotated once, sums of values are rotated back once. A task that reads no rows
// stays in the space of the vectors: rotations are most of what it would load. The softmax is online
// (online_softmax.h). The rows of the next tile are fetched while this one is computed on. Sums are
// float32. A sliding window and padding on the left hide keys before the first that a query sees;
// tiles that no query of the task sees are not fetched.
//
// Where the keys are cut into parts, each part is computed as a whole task is, but for its end: the
// sums, largest scores and weights go to scratch, and tq_attention_merge.cpp makes outputs of them.
// A core takes parts that lie one behind the other, and rotates the queries of a task once for all
// parts of it.
//
// It counts on what the host checked (tiling.h).
//
// Offsets of slots (slot_offsets.h) are of the space before the rotation: a score gets the product
// of the query with one, a sum of values what the rotation makes of their weighted sum. What all
// scores of a query get counts beside a sink and in a softcap.
//
// Tokens of the exact window (exact_tokens.h) come first, as more keys and values in the space before
// the rotation; if rows between them follow, their sums are rotated once. Of a task in parts they
// belong to the last part that has keys.
//
// Where CANN's own attention was over the slots in the middle (tiling.h), its result joins the softmax
// behind the exact tokens, and only rows in front of and behind the middle follow, mostly none.
//
// API forms used here that the headers do not list: Cast of float -> half; Mul with count.
// Not compiled with bisheng, not run on an NPU.
#include "attention_tasks.h"
#include "exact_tokens.h"
#include "head_sinks.h"
#include "online_softmax.h"
#include "row_reader.h"
#include "slot_offsets.h"
#include "softcap.h"

namespace tq {

template <uint32_t D, typename T>
class Attention {
 public:
  __aicore__ inline void init(TPipe* pipe, const TqAttentionTiling& tiling) {
    tasks_.init(tiling);
    scale_ = tiling.scale;
    const uint64_t lanes = static_cast<uint64_t>(tiling.batch) * tiling.heads;
    const uint64_t floats =
        static_cast<uint64_t>(tiling.batch) * tiling.query_heads * tiling.new_tokens * D;
    query_.SetGlobalBuffer((__gm__ T*)tiling.query, floats);
    output_.SetGlobalBuffer((__gm__ T*)tiling.output, floats);
    middle_first_ = tiling.middle_first;
    middle_end_ = tiling.middle_end;
    middle_.SetGlobalBuffer((__gm__ half*)tiling.middle, middle_end_ > 0 ? floats : 0);
    middle_logs_.SetGlobalBuffer((__gm__ float*)tiling.middle_logs,
                                 middle_end_ > 0 ? floats / D + kTaskRows : 0);
    key_rotation_.SetGlobalBuffer((__gm__ float*)tiling.key_rotation, D * D);
    value_rotation_.SetGlobalBuffer((__gm__ float*)tiling.value_rotation, D * D);
    tile_.init(pipe);
    vectors_.init(pipe);
    softmax_.init(pipe);
    averages_.init(pipe);
    sinks_.init(pipe, tiling.head_sink, tiling.query_heads);
    softcap_.init(tiling.softcap);
    keys_.init(pipe, tiling.keys, tiling, tiling.key_centroids, tiling.key_bits);
    values_.init(pipe, tiling.values, tiling, tiling.value_centroids, tiling.value_bits);
    reader_.init(pipe);
    exact_.init(pipe, {tiling.recent, tiling.sinks}, tiling.new_tokens);
    exact_.give(Side::kKeys, keys_, tiling.new_keys, lanes);
    exact_.give(Side::kValues, values_, tiling.new_values, lanes);
    key_offsets_.init(pipe, tiling.key_offset, tiling.offset_rows, tiling.heads);
    value_offsets_.init(pipe, tiling.value_offset, tiling.offset_rows, tiling.heads);
    pipe->InitBuffer(rotated_, kTaskRows * D * sizeof(float));
    pipe->InitBuffer(sums_, kTaskRows * D * sizeof(float));
    pipe->InitBuffer(scores_, OnlineSoftmax<D>::kScores * sizeof(float));
    pipe->InitBuffer(common_scores_, kBlockBytes);
    pipe->InitBuffer(extra_scores_, kTileRows * sizeof(float));
    pipe->InitBuffer(extra_sums_, kTaskRows * D * sizeof(float));
  }

  __aicore__ inline void process() {
    keys_.start();
    values_.start();
    reader_.start();
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
  // How many of the `count` tokens from `first` are before `end`.
  __aicore__ inline uint32_t before(uint32_t end, uint32_t first, uint32_t count) {
    if (end <= first) return 0;
    return end - first < count ? end - first : count;
  }
  __aicore__ inline uint32_t later(uint32_t a, uint32_t b) { return a > b ? a : b; }

  // The rows that query `r` reads are those from the one up to the other, none where that is less:
  // those of the keys that it sees and does not take exactly.
  __aicore__ inline uint32_t rows_begin(uint32_t r) {
    return later(tasks_.least_seen(r), exact_.is_on() ? exact_.rows_begin() : 0);
  }
  __aicore__ inline uint32_t rows_end(uint32_t r) {
    return exact_.is_on() ? exact_.rows_end(tasks_.seen(r)) : tasks_.seen(r);
  }

  // How many of the `count` rows from `first` query `r` reads, with those before the first of them.
  __aicore__ inline uint32_t visible(uint32_t r, uint32_t first, uint32_t count) {
    return before(rows_end(r), first, count);
  }

  // How many of these it does not read, though it reads later ones.
  __aicore__ inline uint32_t unseen(uint32_t r, uint32_t first, uint32_t count) {
    return before(rows_begin(r), first, count);
  }

  // Leaves the sums of a part, and in the softmax the largest scores and weights.
  __aicore__ inline void attend(uint32_t part) {
    Duplicate(sums_.Get<float>(), 0.0f, kTaskRows * D);
    softmax_.start();
    if (exact_.is_on() && part + 1 == tasks_.parts_with_keys()) attend_exactly();
    if (middle_end_ > 0) {
      join_middle();
      attend_rows(tasks_.begin(part), front_end(part));
    }
    attend_rows(later(tasks_.begin(part), middle_end_), end(part));
  }

  // Of a part: where its rows end, and those in front of the middle.
  __aicore__ inline uint32_t end(uint32_t part) {
    const uint32_t begin = tasks_.begin(part), last = tasks_.rows() - 1;
    return begin + before(rows_end(last), begin, tasks_.end(part) - begin);
  }
  __aicore__ inline uint32_t front_end(uint32_t part) {
    const uint32_t begin = tasks_.begin(part);
    return begin + before(middle_first_, begin, end(part) - begin);
  }

  // Whether a query reads any of the rows begin .. end - 1, and of the first part. With nothing else
  // to attend to, queries that see nothing go the way of the others.
  __aicore__ inline bool reads(uint32_t begin, uint32_t end) {
    return end > later(begin, rows_begin(0)) || (!exact_.is_on() && middle_end_ == 0);
  }
  __aicore__ inline bool reads_rows() {
    return reads(tasks_.begin(0), front_end(0)) || reads(later(tasks_.begin(0), middle_end_), end(0));
  }

  // What CANN's attention made of the middle, by which the sums of exact tokens grow.
  __aicore__ inline void join_middle() {
    const LocalTensor<float> logs = extra_scores_.Get<float>(), sums = sums_.Get<float>();
    const LocalTensor<float> averages = reader_.spare(), vectors = vectors_.floats();
    const LocalTensor<half> pairs = tile_.matrix().template ReinterpretCast<half>();
    // The queries of a task, which are of one token, lie one behind the other.
    const uint64_t first = tasks_.place(0);
    Duplicate(averages, 0.0f, kTaskRows * D);
    SetFlag<HardEvent::V_MTE2>(EVENT_ID2);
    WaitFlag<HardEvent::V_MTE2>(EVENT_ID2);
    DataCopy(pairs, middle_[first], tasks_.rows() * D);
    DataCopy(logs, middle_logs_[first / D], kTaskRows);
    SetFlag<HardEvent::MTE2_V>(EVENT_ID2);
    WaitFlag<HardEvent::MTE2_V>(EVENT_ID2);
    reader_.take_pairs(averages, pairs, tasks_.rows(), tile_);
    tile_.multiply_rows(averages, softmax_.join(logs, sums, tile_));
    PipeBarrier<PIPE_V>();
    if (!is_rotated_) tile_.rotate_back(vectors, averages, value_rotation_, tasks_.rows());
    Add(sums, sums, is_rotated_ ? averages : vectors, tasks_.rows() * D);
  }

  // The rows of slots begin .. end - 1.
  __aicore__ inline void attend_rows(uint32_t begin, uint32_t end) {
    if (!reads(begin, end)) return;
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
    if (exact_.is_on()) exact_.find(tasks_.head(), tasks_.past(), tasks_.seen(0));
    is_rotated_ = tasks_.parts() > 1 || reads_rows() || value_offsets_.is_given();
    if (!is_rotated_) return;
    tile_.rotate(rotated, vectors_.floats(), key_rotation_, tasks_.rows());
    Muls(rotated, rotated, scale_, tasks_.rows() * D);
    if (!key_offsets_.is_given()) return;
    const LocalTensor<float> common = common_scores_.Get<float>();
    Duplicate(common, 0.0f, kTaskRows);
    key_offsets_.dot_last(common, vectors_.floats(), tasks_.head(), tasks_.rows(), tile_);
    Muls(common, common, scale_, kTaskRows);
  }

  // The sums of all tokens that queries of the task take exactly.
  __aicore__ inline void attend_exactly() {
    const LocalTensor<float> sums = sums_.Get<float>(), rotated = reader_.spare();
    const uint32_t rows = tasks_.rows(), end = tasks_.keys(), least = tasks_.least_seen(0);
    const uint32_t sinks = exact_.rows_begin();
    attend_exactly(least, sinks < end ? sinks : end, true);
    attend_exactly(later(later(rows_end(0), sinks), least), end, false);
    PipeBarrier<PIPE_V>();  // of a softmax that nothing has entered
    if (!is_rotated_) return;
    tile_.rotate(rotated, sums, value_rotation_, rows);
    Adds(sums, rotated, 0.0f, rows * D);
  }

  // Tokens first .. end - 1, sinks or the newest.
  __aicore__ inline void attend_exactly(uint32_t first, uint32_t end, bool are_sinks) {
    while (first < end) {
      const uint32_t count = exact_.together(first, end);
      attend_exact_tile(first, count, are_sinks);
      first += count;
    }
  }

  // The first of the tokens that query `r` takes.
  __aicore__ inline uint32_t exact_begin(uint32_t r, bool are_sinks) {
    return later(tasks_.least_seen(r), are_sinks ? 0 : rows_end(r));
  }

  __aicore__ inline void attend_exact_tile(uint32_t first, uint32_t count, bool are_sinks) {
    const LocalTensor<float> scores = scores_.Get<float>();
    exact_.load(tile_, value_offsets_, Side::kKeys, first, count);
    Duplicate(scores, float{kHidden}, OnlineSoftmax<D>::kScores);
    for (uint32_t r = 0; r < tasks_.rows(); ++r) {
      const uint32_t seen = before(tasks_.seen(r), first, count);
      if (seen <= before(exact_begin(r, are_sinks), first, count)) continue;
      const LocalTensor<float> row = scores[r * kTileRows];
      tile_.dot_rows(row, vectors_.floats()[r * D], seen);
      Muls(row, row, scale_, seen);
    }
    PipeBarrier<PIPE_V>();
    if (softcap_.is_given()) softcap_.apply(scores, tile_);
    for (uint32_t r = 0; r < tasks_.rows(); ++r) {
      hide(r, before(exact_begin(r, are_sinks), first, count), count);
    }
    PipeBarrier<PIPE_V>();
    softmax_.step(scores, sums_.Get<float>(), tile_);
    exact_.load(tile_, value_offsets_, Side::kValues, first, count);
    for (uint32_t r = 0; r < tasks_.rows(); ++r) {
      const uint32_t seen = before(tasks_.seen(r), first, count);
      add_seen(r, seen, before(exact_begin(r, are_sinks), first, count));
    }
  }

  // To the sums of query `r`: tokens of the tile up to the first `seen`, behind `unseen`.
  __aicore__ inline void add_seen(uint32_t r, uint32_t seen, uint32_t unseen) {
    if (seen <= unseen) return;
    tile_.add_rows(sums_.Get<float>()[r * D], scores_.Get<float>(),
                   r * kTileRows * sizeof(float), seen - unseen, unseen);
  }

  // Starts to fetch the rows of tile `i` of begin .. end; flags i % 2 say that they are there.
  __aicore__ inline void fetch(uint32_t i, uint32_t begin, uint32_t end) {
    const uint32_t first = begin + i * kTileRows, left = end - first;
    const uint32_t count = left < kTileRows ? left : kTileRows;
    keys_.fetch(i % 2, tasks_.head(), first, count);
    values_.fetch(i % 2, tasks_.head(), first, count);
    SetFlag<HardEvent::MTE2_V>(i % 2);
  }

  // The `count` tokens from `first`, whose rows are in place `which`.
  __aicore__ inline void attend(uint32_t first, uint32_t count, uint32_t which) {
    const LocalTensor<float> scores = scores_.Get<float>(), scales = reader_.scales();
    reader_.read(keys_, which, count, tile_);
    Duplicate(scores, float{kHidden}, OnlineSoftmax<D>::kScores);
    for (uint32_t r = 0; r < tasks_.rows(); ++r) {
      const uint32_t seen = visible(r, first, count);
      if (seen <= unseen(r, first, count)) continue;
      const LocalTensor<float> row = scores[r * kTileRows];
      tile_.dot_rows(row, rotated_.Get<float>()[r * D], seen);
      Mul(row, row, scales, seen);
    }
    PipeBarrier<PIPE_V>();
    if (key_offsets_.is_given()) {
      tile_.spread(common_scores_.Get<float>(), 0, kTaskRows);
      Add(scores, scores, tile_.spread(), kLanes, kTaskRows,
          {1, 1, 0, OnlineSoftmax<D>::kStride, OnlineSoftmax<D>::kStride, 1});
      PipeBarrier<PIPE_V>();
    }
    if (first == 0 && key_offsets_.single() > 0) add_key_offsets(least(key_offsets_, count));
    if (softcap_.is_given()) softcap_.apply(scores, tile_);
    hide(first, count);
    softmax_.step(scores, sums_.Get<float>(), tile_);
    if (first == 0 && value_offsets_.single() > 0) add_value_offsets(least(value_offsets_, count));
    reader_.read(values_, which, count, tile_);
    Mul(scores, scores, scales, count, kTaskRows,
        {1, 1, 1, OnlineSoftmax<D>::kStride, OnlineSoftmax<D>::kStride, 0});
    PipeBarrier<PIPE_V>();
    for (uint32_t r = 0; r < tasks_.rows(); ++r) {
      add_seen(r, visible(r, first, count), unseen(r, first, count));
    }
  }

  // Hides the rows that a query does not read, though it reads later ones.
  __aicore__ inline void hide(uint32_t first, uint32_t count) {
    bool is_any = false;
    for (uint32_t r = 0; r < tasks_.rows(); ++r) {
      is_any = hide(r, unseen(r, first, count), count) || is_any;
    }
    if (is_any) PipeBarrier<PIPE_V>();
  }

  // Hides the first `unseen` of `count` scores of query `r`; returns whether it is any and not all,
  // which are hidden already.
  __aicore__ inline bool hide(uint32_t r, uint32_t unseen, uint32_t count) {
    if (unseen == 0 || unseen == count) return false;
    Duplicate(scores_.Get<float>()[r * kTileRows], float{kHidden}, unseen);
    return true;
  }

  __aicore__ inline uint32_t least(SlotOffsets<D>& offsets, uint32_t count) {
    return offsets.single() < count ? offsets.single() : count;
  }

  // To the scores of the first `count` tokens.
  __aicore__ inline void add_key_offsets(uint32_t count) {
    const LocalTensor<float> extra = extra_scores_.Get<float>();
    key_offsets_.load_differences(tile_, tasks_.head(), count);
    for (uint32_t r = 0; r < tasks_.rows(); ++r) {
      const uint32_t seen = visible(r, 0, count);
      if (seen == 0) continue;
      const LocalTensor<float> row = scores_.Get<float>()[r * kTileRows];
      tile_.dot_rows(extra, vectors_.floats()[r * D], seen);
      Muls(extra, extra, scale_, seen);
      PipeBarrier<PIPE_V>();
      Add(row, row, extra, seen);
    }
    PipeBarrier<PIPE_V>();
  }

  // To the sums of values, of the first `count` tokens.
  __aicore__ inline void add_value_offsets(uint32_t count) {
    const LocalTensor<float> extra = extra_sums_.Get<float>(), sums = sums_.Get<float>();
    const LocalTensor<float> rotated = reader_.spare();
    value_offsets_.load_differences(tile_, tasks_.head(), count);
    Duplicate(extra, 0.0f, kTaskRows * D);
    for (uint32_t r = 0; r < tasks_.rows(); ++r) {
      const uint32_t seen = visible(r, 0, count);
      if (seen == 0) continue;
      tile_.add_rows(extra[r * D], scores_.Get<float>(), r * kTileRows * sizeof(float), seen);
    }
    tile_.rotate(rotated, extra, value_rotation_, tasks_.rows());
    Add(sums, sums, rotated, tasks_.rows() * D);
  }

  __aicore__ inline void store_outputs() {
    const uint32_t rows = tasks_.rows();
    const LocalTensor<float> sums = sums_.Get<float>();
    if (sinks_.is_given()) {
      const LocalTensor<float> sinks = softmax_.add_scores(sinks_.of(tasks_), sums, tile_);
      averages_.add(softmax_.weight());
      averages_.add_without_value(sinks);
    } else {
      averages_.add(softmax_.weight());
    }
    averages_.divide(sums, softmax_.weight(), tile_);
    if (is_rotated_) {
      tile_.rotate_back(vectors_.floats(), sums, value_rotation_, rows);
    } else {
      PipeBarrier<PIPE_V>();
      Adds(vectors_.floats(), sums, 0.0f, rows * D);
      PipeBarrier<PIPE_V>();
    }
    value_offsets_.add_last(vectors_.floats(), tasks_.head(), rows, averages_.share(), tile_);
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

  float scale_;
  AttentionTasks<D> tasks_;
  GlobalTensor<T> query_, output_;
  GlobalTensor<float> key_rotation_, value_rotation_, middle_logs_;
  GlobalTensor<half> middle_;
  uint32_t middle_first_, middle_end_;
  bool is_rotated_;
  Tile<D> tile_;
  Vectors<D, T> vectors_;
  OnlineSoftmax<D> softmax_;
  Averages<D> averages_;
  HeadSinks<D, T> sinks_;
  Softcap<D> softcap_;
  CachedRows<D> keys_, values_;
  RowReader<D> reader_;
  ExactTokens<D, T> exact_;
  SlotOffsets<D> key_offsets_, value_offsets_;
  TBuf<TPosition::VECCALC> rotated_, sums_, scores_;
  TBuf<TPosition::VECCALC> common_scores_, extra_scores_, extra_sums_;
};

}  // namespace tq

// The entry points, one per element type.
extern "C" __global__ __vector__ __aicore__ void tq_attention_float32(TqAttentionTiling tiling) {
  tq::run_sized<tq::Attention, float>(tiling);
}

extern "C" __global__ __vector__ __aicore__ void tq_attention_float16(TqAttentionTiling tiling) {
  tq::run_sized<tq::Attention, half>(tiling);
}
