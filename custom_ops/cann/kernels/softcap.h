// softcap * tanh(score / softcap) of the scores of a tile, by
// tanh(x) = sign(x) (1 - e) / (1 + e) with e = exp(-2 |x|), whose absolute error is a few 1e-8.
//
// API forms relied on: Maxs and Mins of float with count. Not compiled with bisheng, not run on an
// NPU.
#pragma once

#include "online_softmax.h"

namespace tq {

template <uint32_t D>
class Softcap {
 public:
  // 0 for none.
  __aicore__ inline void init(float softcap) { softcap_ = softcap; }

  __aicore__ inline bool is_given() { return softcap_ > 0.0f; }

  // In place; what is hidden stays hidden.
  __aicore__ inline void apply(const LocalTensor<float>& scores, Tile<D>& tile) {
    constexpr uint32_t kCount = OnlineSoftmax<D>::kScores;
    static_assert(3 * kCount <= kTileRows * D, "they are in the scratch of a tile");
    const LocalTensor<float> hiding = tile.scratch(), sign = tile.scratch()[kCount];
    const LocalTensor<float> power = tile.scratch()[2 * kCount];
    // 0, but far below all scores where they are hidden.
    Adds(hiding, scores, -float{kNothing}, kCount);
    Muls(sign, scores, float{kSteep}, kCount);
    PipeBarrier<PIPE_V>();
    Mins(hiding, hiding, 0.0f, kCount);
    Mins(sign, sign, 1.0f, kCount);
    PipeBarrier<PIPE_V>();
    Maxs(sign, sign, -1.0f, kCount);
    PipeBarrier<PIPE_V>();
    Mul(power, scores, sign, kCount);
    PipeBarrier<PIPE_V>();
    Muls(power, power, -2.0f / softcap_, kCount);
    PipeBarrier<PIPE_V>();
    Exp(power, power, kCount);
    PipeBarrier<PIPE_V>();
    Muls(scores, power, -1.0f, kCount);
    Adds(power, power, 1.0f, kCount);
    PipeBarrier<PIPE_V>();
    Adds(scores, scores, 1.0f, kCount);
    PipeBarrier<PIPE_V>();
    Div(scores, scores, power, kCount);
    PipeBarrier<PIPE_V>();
    Mul(scores, scores, sign, kCount);
    PipeBarrier<PIPE_V>();
    Muls(scores, scores, softcap_, kCount);
    PipeBarrier<PIPE_V>();
    Add(scores, scores, hiding, kCount);
    PipeBarrier<PIPE_V>();
  }

 private:
  static constexpr float kSteep = 1.0e30f;  // a score below 1 / kSteep has a tanh of 0 anyway

  float softcap_;
};

}  // namespace tq
