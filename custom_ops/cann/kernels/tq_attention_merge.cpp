// The outputs of tq_attention.cpp where the keys of a task were cut into parts: for each query the
// parts' sums, weighted by what the largest score of a part is beside the largest of all, over the
// sum of all weights, that of a sink included, and rotated back.
//
// A task is that of the attention (attention_tasks.h). The factors of all parts are computed at
// once; the sums of the next part are fetched while those of one are added. What is added to what
// depends on the number of parts alone.
//
// API forms used here that the headers do not list: Max, Add, Mul, Sub with a mask of one block and
// up to 64 repeats; Exp and Adds with count. Not compiled with bisheng, not run on an NPU.
#include "attention_tasks.h"
#include "head_sinks.h"
#include "online_softmax.h"
#include "slot_offsets.h"

namespace tq {

template <uint32_t D, typename T>
class AttentionMerge {
 public:
  __aicore__ inline void init(TPipe* pipe, const TqAttentionTiling& tiling) {
    tasks_.init(tiling);
    output_.SetGlobalBuffer((__gm__ T*)tiling.output, static_cast<uint64_t>(tiling.batch) *
                                                          tiling.query_heads * tiling.new_tokens *
                                                          D);
    value_rotation_.SetGlobalBuffer((__gm__ float*)tiling.value_rotation, D * D);
    tile_.init(pipe);
    vectors_.init(pipe);
    averages_.init(pipe);
    sinks_.init(pipe, tiling.head_sink, tiling.query_heads);
    value_offsets_.init(pipe, tiling.value_offset, tiling.offset_rows, tiling.heads);
    const uint32_t parts = tiling.parts;
    pipe->InitBuffer(part_, 2 * kRows * sizeof(float));
    pipe->InitBuffer(sums_, kRows * sizeof(float));
    pipe->InitBuffer(factors_, parts * kBlockBytes);
    pipe->InitBuffer(weights_, parts * kBlockBytes);
    pipe->InitBuffer(folded_, parts * kBlockBytes);
    pipe->InitBuffer(sink_weights_, kBlockBytes);
  }

  __aicore__ inline void process() {
    for (uint32_t task = GetBlockIdx(); task < tasks_.count(); task += GetBlockNum()) {
      tasks_.choose(task);
      merge();
      store();
    }
  }

 private:
  static constexpr uint32_t kRows = kTaskRows * D;

  __aicore__ inline void merge() {
    const uint32_t parts = tasks_.parts_with_keys();
    // The vector unit has left what it read of the task before: the rotation came in behind that.
    DataCopy(factors_.Get<float>(), tasks_.tops(0), parts * kTaskRows);
    DataCopy(weights_.Get<float>(), tasks_.weights(0), parts * kTaskRows);
    SetFlag<HardEvent::MTE2_V>(EVENT_ID2);
    fetch(0);
    WaitFlag<HardEvent::MTE2_V>(EVENT_ID2);
    weigh(parts);
    const LocalTensor<float> sums = sums_.Get<float>();
    Duplicate(sums, 0.0f, kRows);
    for (uint32_t p = 0; p < parts; ++p) {
      if (p + 1 < parts) {
        if (p > 0) WaitFlag<HardEvent::V_MTE2>((p + 1) % 2);
        fetch(p + 1);
      }
      const LocalTensor<float> part = part_.Get<float>()[p % 2 * kRows];
      WaitFlag<HardEvent::MTE2_V>(p % 2);
      tile_.multiply_rows(part, factors_.Get<float>()[p * kTaskRows]);
      PipeBarrier<PIPE_V>();
      Add(sums, sums, part, kRows);
      SetFlag<HardEvent::V_MTE2>(p % 2);
    }
    for (uint32_t p = parts < 2 ? 0 : parts - 2; p < parts; ++p) {
      WaitFlag<HardEvent::V_MTE2>(p % 2);
    }
    averages_.divide(sums, weights_.Get<float>(), tile_);
  }

  // Starts to fetch the sums of part `p`; flags p % 2 say that they are there.
  __aicore__ inline void fetch(uint32_t p) {
    DataCopy(part_.Get<float>()[p % 2 * kRows], tasks_.sums(p), kRows);
    SetFlag<HardEvent::MTE2_V>(p % 2);
  }

  // factors_ = what each part counts for each query; the first block of weights_ = their sums, to
  // which the averages add what a sink weighs.
  __aicore__ inline void weigh(uint32_t parts) {
    const uint32_t count = parts * kTaskRows;
    const LocalTensor<float> factors = factors_.Get<float>(), weights = weights_.Get<float>();
    const LocalTensor<float> folded = folded_.Get<float>(), added = sink_weights_.Get<float>();
    Adds(folded, factors, 0.0f, count);
    PipeBarrier<PIPE_V>();
    for (uint32_t left = parts; left > 1;) {
      const uint32_t kept = (left + 1) / 2;
      Max(folded, folded, folded[kept * kTaskRows], (left - kept) * kTaskRows);
      PipeBarrier<PIPE_V>();
      left = kept;
    }
    if (sinks_.is_given()) {
      const LocalTensor<float> sinks = sinks_.of(tasks_);
      Max(folded, folded, sinks, kTaskRows);
      PipeBarrier<PIPE_V>();
      Sub(added, sinks, folded, kTaskRows);
      PipeBarrier<PIPE_V>();
      Exp(added, added, kTaskRows);
    }
    Sub(factors, factors, folded, kTaskRows, parts, {1, 1, 1, 1, 1, 0});
    PipeBarrier<PIPE_V>();
    Exp(factors, factors, count);
    PipeBarrier<PIPE_V>();
    Mul(weights, weights, factors, count);
    PipeBarrier<PIPE_V>();
    for (uint32_t left = parts; left > 1;) {
      const uint32_t kept = (left + 1) / 2;
      Add(weights, weights, weights[kept * kTaskRows], (left - kept) * kTaskRows);
      PipeBarrier<PIPE_V>();
      left = kept;
    }
    averages_.add(weights);
    if (sinks_.is_given()) averages_.add_without_value(added);
  }

  __aicore__ inline void store() {
    const uint32_t rows = tasks_.rows();
    // The outputs of the task before were stored from where these are made.
    SetFlag<HardEvent::MTE3_V>(EVENT_ID2);
    WaitFlag<HardEvent::MTE3_V>(EVENT_ID2);
    tile_.rotate_back(vectors_.floats(), sums_.Get<float>(), value_rotation_, rows);
    value_offsets_.add_last(vectors_.floats(), tasks_.head(), rows, averages_.share(), tile_);
    vectors_.narrow(rows);
    SetFlag<HardEvent::V_MTE3>(EVENT_ID2);
    WaitFlag<HardEvent::V_MTE3>(EVENT_ID2);
    for (uint32_t r = 0; r < rows; ++r) {
      DataCopy(output_[tasks_.place(r)], vectors_.elements()[r * D], D);
    }
  }

  AttentionTasks<D> tasks_;
  GlobalTensor<T> output_;
  GlobalTensor<float> value_rotation_;
  Tile<D> tile_;
  Vectors<D, T> vectors_;
  SlotOffsets<D> value_offsets_;
  Averages<D> averages_;
  HeadSinks<D, T> sinks_;
  TBuf<TPosition::VECCALC> part_, sums_, factors_, weights_, folded_, sink_weights_;
};

}  // namespace tq

// The entry points, one per element type.
extern "C" __global__ __vector__ __aicore__ void tq_attention_merge_float32(TqAttentionTiling tiling) {
  tq::run_sized<tq::AttentionMerge, float>(tiling);
}

extern "C" __global__ __vector__ __aicore__ void tq_attention_merge_float16(TqAttentionTiling tiling) {
  tq::run_sized<tq::AttentionMerge, half>(tiling);
}
