// Swish (docs/operators.md): y = x / (1 + exp(-x)) of `count` elements, computed in float32.
//
// A task is up to 8,192 elements, which every instruction takes together. It counts on what the
// host checked (launch.h). Where exp(-x) is infinite, y is -0.
//
// API forms used here that the headers do not list: Muls, Exp, Adds, Div with count.
// Not compiled with bisheng, not run on an NPU.
#include "double_buffer.h"

namespace tq {

template <typename T>
class Swish {
 public:
  __aicore__ inline void init(TPipe* pipe, GM_ADDR x, GM_ADDR y, uint32_t count) {
    count_ = count;
    x_.SetGlobalBuffer((__gm__ T*)x, count);
    y_.SetGlobalBuffer((__gm__ T*)y, count);
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

template <typename T>
__aicore__ inline void run_swish(GM_ADDR x, GM_ADDR y, uint32_t count) {
  TPipe pipe;
  Swish<T> kernel;
  kernel.init(&pipe, x, y, count);
  kernel.process();
}

}  // namespace tq

// The entry points, one per element type; arguments as in launch.h. They are written out, since the
// build of Ascend reads their names and arguments from here.
extern "C" __global__ __aicore__ void tq_swish_float32(GM_ADDR x, GM_ADDR y, uint32_t count) {
  TQ_VECTOR_ONLY();
  tq::run_swish<float>(x, y, count);
}

extern "C" __global__ __aicore__ void tq_swish_float16(GM_ADDR x, GM_ADDR y, uint32_t count) {
  TQ_VECTOR_ONLY();
  tq::run_swish<half>(x, y, count);
}
