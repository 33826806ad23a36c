// Sinks of the query heads: one more score each, of a key without a value, in the elements of the
// model [query_heads].
//
// API forms relied on: GetValue of half in global memory, SetValue of half in UB. Not compiled with
// bisheng, not run on an NPU.
#pragma once

#include "attention_tasks.h"

namespace tq {

template <uint32_t D, typename T>
class HeadSinks {
 public:
  __aicore__ inline void init(TPipe* pipe, uint64_t sinks, uint32_t query_heads) {
    is_given_ = sinks != 0;
    sinks_.SetGlobalBuffer((__gm__ T*)sinks, is_given_ ? query_heads : 0);
    pipe->InitBuffer(elements_, kBlockBytes);
    pipe->InitBuffer(floats_, kBlockBytes);
  }

  __aicore__ inline bool is_given() { return is_given_; }

  // Those of the queries of a task, as eight floats.
  __aicore__ inline LocalTensor<float> of(AttentionTasks<D>& tasks) {
    const LocalTensor<T> elements = elements_.template Get<T>();
    SetFlag<HardEvent::V_S>(EVENT_ID2);
    WaitFlag<HardEvent::V_S>(EVENT_ID2);
    for (uint32_t r = 0; r < kTaskRows; ++r) {
      // Nobody reads the results of rows without a query.
      elements.SetValue(r, sinks_.GetValue(tasks.query_head(r)));
    }
    SetFlag<HardEvent::S_V>(EVENT_ID2);
    WaitFlag<HardEvent::S_V>(EVENT_ID2);
    if constexpr (sizeof(T) == sizeof(float)) {
      return elements;
    } else {
      Cast(floats_.Get<float>(), elements, RoundMode::CAST_NONE, kTaskRows);
      PipeBarrier<PIPE_V>();
      return floats_.Get<float>();
    }
  }

 private:
  bool is_given_;
  GlobalTensor<T> sinks_;
  TBuf<TPosition::VECCALC> elements_, floats_;
};

}  // namespace tq
