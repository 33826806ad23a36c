// Swish (docs/operators.md): y = x / (1 + exp(-x)) of `count` elements, computed in float32.
//
// A task is up to 8,192 elements, which every instruction takes together. It counts on what the
// host checked (tiling.h). Where exp(-x) is infinite, y is -0.
//
// API forms used here that the headers do not list: Muls, Exp, Adds, Div with count.
// Not compiled with bisheng, not run on an NPU.
#include "double_buffer.h"

namespace tq {

template <typename T>
class Swish {
 public:
  __aicore__ inline void init(TPipe* pipe, const TqSwishTiling& tiling) {
    count_ = tiling.count;
    x_.SetGlobalBuffer((__gm__ T*)tiling.x, count_);
    y_.SetGlobalBuffer((__gm__ T*)tiling.y, count_);
    in_.init(pipe);
    out_.init(pipe);
  }

  __aicore__ inline void process() {
    const uint32_t units = (count_ - 1) / kUnit + 1;
    const uint32_t step = share(units, 1, kElements / kUnit) * kUnit;
    const uint32_t tasks = (count_ - 1) / step + 1;
    for (uint32_t task = GetBlockIdx(); task < tasks; task += GetBlockNum()) {
      const uint32_t first = task * step;
      compute(first, count_ - first < step ? count_ - first : step);
    }
    in_.finish();
    out_.finish();
  }

 private:
  static constexpr uint32_t kElements = 8192;
  static constexpr uint32_t kUnit = 256;  // less is not worth a core

  __aicore__ inline void compute(uint32_t first, uint32_t count) {
    in_.fetch(x_[first], count);
    const LocalTensor<float> x = in_.take(count), y = out_.floats();
    Muls(y, x, -1.0f, count);
    PipeBarrier<PIPE_V>();
    Exp(y, y, count);
    PipeBarrier<PIPE_V>();
    Adds(y, y, 1.0f, count);
    PipeBarrier<PIPE_V>();
    Div(y, x, y, count);
    in_.give_back();
    out_.store(y_[first], count);
  }

  uint32_t count_;
  GlobalTensor<T> x_, y_;
  Incoming<T, kElements> in_;
  Outgoing<T, kElements> out_;
};

}  // namespace tq

// The entry points, one per element type.
extern "C" __global__ __vector__ __aicore__ void tq_swish_float32(TqSwishTiling tiling) {
  tq::run<tq::Swish<float>>(tiling);
}

extern "C" __global__ __vector__ __aicore__ void tq_swish_float16(TqSwishTiling tiling) {
  tq::run<tq::Swish<half>>(tiling);
}
