// RotaryEmbedding (docs/operators.md) of x [heads, new_tokens, D] for tokens whose positions run
// on: y1 = x1 cos - x2 sin and y2 = x2 cos + x1 sin of the halves x1, x2 of each row, in float32.
//
// A task is up to 16 tokens of as many heads as fit in 8,192 elements: their rows of the tables are
// fetched once for all of its heads. A multiplication takes all tokens of a head or all heads of a
// token, whichever are more, and goes through the table with them or stays in its row; sums take
// the whole task. It counts on what the host checked (tiling.h).
//
// API forms used here that the headers do not list: Mul, Sub, Add with `mask, repeats, strides` (see
// tile.h), a mask of 32 or 64 and up to 128 repeats.
// Not compiled with bisheng, not run on an NPU.
#include "double_buffer.h"

namespace tq {

template <uint32_t D, typename T>
class RotaryEmbedding {
 public:
  __aicore__ inline void init(TPipe* pipe, const TqRotaryEmbeddingTiling& tiling) {
    heads_ = tiling.heads;
    new_tokens_ = tiling.new_tokens;
    first_ = tiling.first;
    count_ = tiling.count;
    position_ = tiling.position;
    const uint64_t elements = static_cast<uint64_t>(heads_) * new_tokens_ * D;
    const uint64_t angles = (static_cast<uint64_t>(position_) + count_) * kHalf;
    x_.SetGlobalBuffer((__gm__ T*)tiling.x, elements);
    y_.SetGlobalBuffer((__gm__ T*)tiling.y, elements);
    cosines_global_.SetGlobalBuffer((__gm__ float*)tiling.cosines, angles);
    sines_global_.SetGlobalBuffer((__gm__ float*)tiling.sines, angles);
    in_.init(pipe);
    out_.init(pipe);
    pipe->InitBuffer(cosines_, 2 * kTokens * kHalf * sizeof(float));
    pipe->InitBuffer(sines_, 2 * kTokens * kHalf * sizeof(float));
    pipe->InitBuffer(crossed_, kElements * sizeof(float));
  }

  __aicore__ inline void process() {
    const uint32_t blocks = (count_ - 1) / kTokens + 1;
    const uint32_t tokens = count_ < kTokens ? count_ : kTokens;
    const uint32_t step =
        share(heads_ * blocks, (kLeastRows - 1) / tokens + 1, kElements / D / tokens);
    const uint32_t groups = (heads_ - 1) / step + 1;
    for (uint32_t task = GetBlockIdx(); task < blocks * groups; task += GetBlockNum()) {
      const uint32_t token = task / groups * kTokens, head = task % groups * step;
      rotate(head, heads_ - head < step ? heads_ - head : step, token,
             count_ - token < kTokens ? count_ - token : kTokens);
    }
    in_.finish();
    out_.finish();
  }

 private:
  static constexpr uint32_t kHalf = D / 2;
  static constexpr uint32_t kElements = 8192;
  static constexpr uint32_t kTokens = 16;
  static constexpr uint32_t kLeastRows = 8;  // fewer take an instruction as long
  static constexpr uint8_t kStride = D / kBlockFloats;
  static constexpr uint8_t kHalfStride = kHalf / kBlockFloats;
  static_assert(kHalf <= kLanes, "half a row is one repeat at most");
  static_assert(kElements / D < 256, "the rows of a task are the repeats of one instruction");

  // `heads` heads from `head` on, and of them `tokens` tokens from `token` of those that count.
  __aicore__ inline void rotate(uint32_t head, uint32_t heads, uint32_t token, uint32_t tokens) {
    fetch(head, heads, token, tokens);
    const uint32_t rows = heads * tokens;
    const uint32_t table = in_.taken() * kTokens * kHalf;
    const LocalTensor<float> x = in_.take(rows * D), y = out_.floats();
    const LocalTensor<float> crossed = crossed_.Get<float>();
    multiply(y, x, crossed, cosines_.Get<float>()[table], sines_.Get<float>()[table], heads,
             tokens);
    in_.give_back();
    PipeBarrier<PIPE_V>();
    const BinaryRepeatParams strides{1, 1, 1, kStride, kStride, kStride};
    const uint8_t repeats = static_cast<uint8_t>(rows);
    Sub(y, y, crossed, kHalf, repeats, strides);
    Add(y[kHalf], y[kHalf], crossed[kHalf], kHalf, repeats, strides);
    store(head, heads, token, tokens);
  }

  // y = (x1 cos, x2 cos) and crossed = (x2 sin, x1 sin).
  __aicore__ inline void multiply(const LocalTensor<float>& y, const LocalTensor<float>& x,
                                  const LocalTensor<float>& crossed,
                                  const LocalTensor<float>& cosines,
                                  const LocalTensor<float>& sines, uint32_t heads,
                                  uint32_t tokens) {
    // Heads are a repeat each only if they are more than the tokens, which are few then: their
    // stride is below 256 blocks.
    const bool by_head = heads > tokens;
    const uint32_t times = by_head ? tokens : heads;
    const uint32_t row = by_head ? D : tokens * D, angle = by_head ? kHalf : 0;
    const uint8_t repeats = static_cast<uint8_t>(by_head ? heads : tokens);
    const uint8_t stride = static_cast<uint8_t>(by_head ? tokens * kStride : kStride);
    const uint8_t table = by_head ? 0 : kHalfStride;
    const BinaryRepeatParams strides{1, 1, 1, stride, stride, table};
    for (uint32_t i = 0; i < times; ++i) {
      const LocalTensor<float> first = x[i * row], second = x[i * row + kHalf];
      const LocalTensor<float> cosine = cosines[i * angle], sine = sines[i * angle];
      Mul(y[i * row], first, cosine, kHalf, repeats, strides);
      Mul(y[i * row + kHalf], second, cosine, kHalf, repeats, strides);
      Mul(crossed[i * row], second, sine, kHalf, repeats, strides);
      Mul(crossed[i * row + kHalf], first, sine, kHalf, repeats, strides);
    }
  }

  __aicore__ inline uint64_t place(uint32_t head, uint32_t token) {
    return (static_cast<uint64_t>(head) * new_tokens_ + first_ + token) * D;
  }

  __aicore__ inline void fetch(uint32_t head, uint32_t heads, uint32_t token, uint32_t tokens) {
    const LocalTensor<T> rows = in_.open();
    const uint32_t table = in_.opened() * kTokens * kHalf;
    const uint64_t angle = (static_cast<uint64_t>(position_) + token) * kHalf;
    DataCopy(cosines_.Get<float>()[table], cosines_global_[angle], tokens * kHalf);
    DataCopy(sines_.Get<float>()[table], sines_global_[angle], tokens * kHalf);
    if (tokens == new_tokens_) {
      DataCopy(rows, x_[place(head, token)], heads * tokens * D);
    } else {
      for (uint32_t h = 0; h < heads; ++h) {
        DataCopy(rows[h * tokens * D], x_[place(head + h, token)], tokens * D);
      }
    }
    in_.close();
  }

  __aicore__ inline void store(uint32_t head, uint32_t heads, uint32_t token, uint32_t tokens) {
    const LocalTensor<T> rows = out_.open(heads * tokens * D);
    if (tokens == new_tokens_) {
      DataCopy(y_[place(head, token)], rows, heads * tokens * D);
    } else {
      for (uint32_t h = 0; h < heads; ++h) {
        DataCopy(y_[place(head + h, token)], rows[h * tokens * D], tokens * D);
      }
    }
    out_.close();
  }

  uint32_t heads_, new_tokens_, first_, count_, position_;
  GlobalTensor<T> x_, y_;
  GlobalTensor<float> cosines_global_, sines_global_;
  Incoming<T, kElements> in_;
  Outgoing<T, kElements> out_;
  TBuf<TPosition::VECCALC> cosines_, sines_, crossed_;
};

}  // namespace tq

// The entry points, one per element type.
extern "C" __global__ __vector__ __aicore__ void tq_rotary_embedding_float32(TqRotaryEmbeddingTiling tiling) {
  tq::run_sized<tq::RotaryEmbedding, float>(tiling);
}

extern "C" __global__ __vector__ __aicore__ void tq_rotary_embedding_float16(TqRotaryEmbeddingTiling tiling) {
  tq::run_sized<tq::RotaryEmbedding, half>(tiling);
}
