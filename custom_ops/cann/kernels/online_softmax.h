// The softmax of eight queries over keys that come in tiles of 64: for each query the largest score
// so far and the sum of the weights, all eight of either in one block of 32 bytes.
//
// A row of 64 scores is one repeat of the vector unit. Reduced by blocks twice, the eight rows
// leave eight numbers in one block, so that no step looks at one query alone.
//
// API forms relied on: BlockReduceMax and BlockReduceSum (repeats, mask, dstRepStride in blocks,
// srcBlkStride, srcRepStride) of float with whole repeats; Exp, Max, Sub, Mul, Add, Adds with
// count; Sub with repeats whose second operand is one block for each. Not compiled with bisheng,
// not run on an NPU.
#pragma once

#include "tile.h"

namespace tq {

constexpr float kHidden = -3.0e38f;     // score of what a query does not see; finite, so that
                                        // differences are numbers
constexpr float kNothing = -1.0e38f;    // largest score of a query that saw nothing: weights of what
                                        // is hidden are 0 beside it
constexpr float kLeastTotal = 1.0e-30f; // sum of weights of such a query; added to any other, which
                                        // is 1 at least, it changes no bit

static_assert(kTileRows == kLanes && kTaskRows == kBlockFloats,
              "a row of scores is a repeat, their maxima are a block");

template <uint32_t D>
class OnlineSoftmax {
 public:
  static constexpr uint32_t kScores = kTaskRows * kTileRows;
  static constexpr uint32_t kStride = kTileRows / kBlockFloats;  // blocks from row to row

  __aicore__ inline void init(TPipe* pipe) {
    pipe->InitBuffer(partial_, kTaskRows * kBlockBytes);
    pipe->InitBuffer(top_, kBlockBytes);
    pipe->InitBuffer(new_top_, kBlockBytes);
    pipe->InitBuffer(shrink_, kBlockBytes);
    pipe->InitBuffer(weight_, kBlockBytes);
    pipe->InitBuffer(new_weight_, kBlockBytes);
  }

  // Queries that have seen nothing yet.
  __aicore__ inline void start() {
    Duplicate(top_.Get<float>(), float{kNothing}, kTaskRows);
    Duplicate(weight_.Get<float>(), 0.0f, kTaskRows);
  }

  // Scores of the next tile become weights; `sums`, eight rows that were summed with the weights
  // so far, shrink to what those are worth now.
  __aicore__ inline void step(const LocalTensor<float>& scores, const LocalTensor<float>& sums,
                              Tile<D>& tile) {
    const LocalTensor<float> partial = partial_.Get<float>(), shrink = shrink_.Get<float>();
    const LocalTensor<float> top = top_.Get<float>(), new_top = new_top_.Get<float>();
    const LocalTensor<float> weight = weight_.Get<float>();
    const LocalTensor<float> new_weight = new_weight_.Get<float>();
    BlockReduceMax(partial, scores, kTaskRows, kLanes, 1, 1, kStride);
    PipeBarrier<PIPE_V>();
    BlockReduceMax(new_top, partial, 1, kLanes, 1, 1, kTaskRows);
    PipeBarrier<PIPE_V>();
    Max(new_top, new_top, top, kTaskRows);
    PipeBarrier<PIPE_V>();
    Sub(shrink, top, new_top, kTaskRows);
    PipeBarrier<PIPE_V>();
    Exp(shrink, shrink, kTaskRows);
    Adds(top, new_top, 0.0f, kTaskRows);
    tile.spread(new_top, 0, kTaskRows);
    Sub(scores, scores, tile.spread(), kLanes, kTaskRows, {1, 1, 0, kStride, kStride, 1});
    PipeBarrier<PIPE_V>();
    Exp(scores, scores, kScores);
    PipeBarrier<PIPE_V>();
    BlockReduceSum(partial, scores, kTaskRows, kLanes, 1, 1, kStride);
    PipeBarrier<PIPE_V>();
    BlockReduceSum(new_weight, partial, 1, kLanes, 1, 1, kTaskRows);
    Mul(weight, weight, shrink, kTaskRows);
    PipeBarrier<PIPE_V>();
    Add(weight, weight, new_weight, kTaskRows);
    tile.multiply_rows(sums, shrink);
  }

  // The largest scores and the sums of weights of all tiles.
  __aicore__ inline LocalTensor<float> top() { return top_.Get<float>(); }
  __aicore__ inline LocalTensor<float> weight() { return weight_.Get<float>(); }

  // One more score for each query, of a key without a value. Returns what those weigh.
  __aicore__ inline LocalTensor<float> add_scores(const LocalTensor<float>& scores,
                                                  const LocalTensor<float>& sums, Tile<D>& tile) {
    const LocalTensor<float> shrink = shrink_.Get<float>(), weight = weight_.Get<float>();
    const LocalTensor<float> new_top = new_top_.Get<float>(), added = new_weight_.Get<float>();
    Max(new_top, top_.Get<float>(), scores, kTaskRows);
    PipeBarrier<PIPE_V>();
    Sub(shrink, top_.Get<float>(), new_top, kTaskRows);
    Sub(added, scores, new_top, kTaskRows);
    PipeBarrier<PIPE_V>();
    Exp(shrink, shrink, kTaskRows);
    Exp(added, added, kTaskRows);
    PipeBarrier<PIPE_V>();
    Mul(weight, weight, shrink, kTaskRows);
    tile.multiply_rows(sums, shrink);
    return added;
  }

  // The softmax of other keys, of which `logs` are the logarithms of the sums of weights, joins this
  // one. Returns what its averages weigh.
  __aicore__ inline LocalTensor<float> join(const LocalTensor<float>& logs,
                                            const LocalTensor<float>& sums, Tile<D>& tile) {
    const LocalTensor<float> weight = weight_.Get<float>(), added = add_scores(logs, sums, tile);
    Adds(top_.Get<float>(), new_top_.Get<float>(), 0.0f, kTaskRows);
    Add(weight, weight, added, kTaskRows);
    return added;
  }

 private:
  TBuf<TPosition::VECCALC> partial_, top_, new_top_, shrink_, weight_, new_weight_;
};

// The end of a softmax: sums over all keys to averages.
template <uint32_t D>
class Averages {
 public:
  __aicore__ inline void init(TPipe* pipe) {
    pipe->InitBuffer(total_, kBlockBytes);
    pipe->InitBuffer(share_, kBlockBytes);
  }

  // The sums of all weights: those of keys, and what weighs without a value, where there is that.
  __aicore__ inline void add(const LocalTensor<float>& weight) {
    Adds(total_.Get<float>(), weight, float{kLeastTotal}, kTaskRows);
    PipeBarrier<PIPE_V>();
  }
  __aicore__ inline void add_without_value(const LocalTensor<float>& weight) {
    Add(total_.Get<float>(), total_.Get<float>(), weight, kTaskRows);
    PipeBarrier<PIPE_V>();
  }

  // `weight` are those of keys. Queries that saw no key get zeros.
  __aicore__ inline void divide(const LocalTensor<float>& sums, const LocalTensor<float>& weight,
                                Tile<D>& tile) {
    Div(share_.Get<float>(), weight, total_.Get<float>(), kTaskRows);
    tile.divide_rows(sums, total_.Get<float>());
  }

  // What part of each query's weights is on keys, and so on what is added to all values.
  __aicore__ inline LocalTensor<float> share() { return share_.Get<float>(); }

 private:
  TBuf<TPosition::VECCALC> total_, share_;
};

}  // namespace tq
