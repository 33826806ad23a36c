// RMSNormalization (docs/operators.md): y = x / sqrt(mean(x^2) + epsilon) * scale of each row of x
// [rows, width], computed in float32.
//
// There are two ways. Where many rows are narrow, as with norms of heads, a task is as many of them
// as fit, and an instruction takes 64 columns of all of them. Otherwise a task is one row, and an
// instruction takes all of it, or 5,120 columns of a wider row, which is then read twice: a single
// row is on one core. Nothing waits for the scalar unit: roots are spread to blocks by Gather.
//
// It counts on what the host checked (tiling.h).
//
// API forms used here that the headers do not list. With `mask, repeats, strides` (see tile.h): Add,
// Mul, Div, WholeReduceSum. With `count`: Mul, Add, Muls, Adds (also of int32_t), Sqrt, Duplicate,
// Gather (byte offsets as uint32_t and a byte base).
// Not compiled with bisheng, not run on an NPU.
#include "double_buffer.h"

namespace tq {

template <typename T>
class RmsNormalization {
 public:
  __aicore__ inline void init(TPipe* pipe, const TqRmsNormalizationTiling& tiling) {
    rows_ = tiling.rows;
    width_ = tiling.width;
    epsilon_ = tiling.epsilon;
    const uint64_t elements = static_cast<uint64_t>(rows_) * width_;
    x_.SetGlobalBuffer((__gm__ T*)tiling.x, elements);
    y_.SetGlobalBuffer((__gm__ T*)tiling.y, elements);
    scale_global_.SetGlobalBuffer((__gm__ T*)tiling.scale, width_);
    in_.init(pipe);
    out_.init(pipe);
    pipe->InitBuffer(scale_, kColumns * sizeof(float));
    if constexpr (kHalves) pipe->InitBuffer(scale_halves_, kColumns * sizeof(T));
    pipe->InitBuffer(squares_, kColumns * sizeof(float));
    pipe->InitBuffer(more_squares_, kColumns * sizeof(float));
    pipe->InitBuffer(means_, kMostRows * sizeof(float));
    pipe->InitBuffer(roots_, kMostRows * kBlockBytes);
    pipe->InitBuffer(places_, kMostRows * kBlockBytes);
  }

  __aicore__ inline void process() {
    if (width_ <= kColumns) load_scale();
    // Which way takes fewer instructions, roughly.
    if (width_ <= kWidest && width_ <= kRowWidth * static_cast<uint64_t>(rows_)) {
      const uint32_t fit = kColumns / width_;
      const uint32_t step = share(rows_, kLeastRows, fit < kMostRows ? fit : kMostRows);
      const uint32_t tasks = (rows_ - 1) / step + 1;
      make_places(step);
      for (uint32_t task = GetBlockIdx(); task < tasks; task += GetBlockNum()) {
        const uint32_t first = task * step;
        normalise_rows(first, rows_ - first < step ? rows_ - first : step);
      }
    } else {
      make_places(1);
      for (uint32_t row = GetBlockIdx(); row < rows_; row += GetBlockNum()) normalise_row(row);
    }
    in_.finish();
    out_.finish();
  }

 private:
  static constexpr bool kHalves = sizeof(T) != sizeof(float);
  static constexpr uint32_t kColumns = 5120;   // of a wide row, or elements of narrow ones
  static constexpr uint32_t kMostRows = 128;   // a power of 2, below 256 repeats
  static constexpr uint32_t kLeastRows = 8;    // fewer take an instruction as long
  static constexpr uint32_t kWidest = 1024;    // columns of rows that are taken together
  static constexpr uint32_t kRowWidth = 256;   // columns for each of them that there is

  // Without a flag of its own for floats: the first rows are behind them in the pipe.
  __aicore__ inline void load_scale() {
    if constexpr (kHalves) {
      const LocalTensor<T> halves = scale_halves_.template Get<T>();
      DataCopy(halves, scale_global_, width_);
      SetFlag<HardEvent::MTE2_V>(EVENT_ID2);
      WaitFlag<HardEvent::MTE2_V>(EVENT_ID2);
      Cast(scale_.Get<float>(), halves, RoundMode::CAST_NONE, width_);
    } else {
      DataCopy(scale_.Get<float>(), scale_global_, width_);
    }
  }

  // places = the byte offset of the mean of each of `count` rows at least, eight times.
  __aicore__ inline void make_places(uint32_t count) {
    const LocalTensor<int32_t> places = places_.Get<int32_t>();
    Duplicate(places, static_cast<int32_t>(0), kBlockFloats);
    for (uint32_t rows = 1; rows < count; rows *= 2) {
      PipeBarrier<PIPE_V>();
      Adds(places[rows * kBlockFloats], places, static_cast<int32_t>(rows * sizeof(float)),
           rows * kBlockFloats);
    }
  }

  // Columns that a repeat from `first` on has.
  __aicore__ inline uint32_t lanes(uint32_t first) {
    return width_ - first < kLanes ? width_ - first : kLanes;
  }

  __aicore__ inline void normalise_rows(uint32_t first, uint32_t count) {
    const uint64_t place = static_cast<uint64_t>(first) * width_;
    const uint32_t elements = count * width_;
    const uint8_t repeats = static_cast<uint8_t>(count);
    const uint8_t stride = static_cast<uint8_t>(width_ / kBlockFloats);
    in_.fetch(x_[place], elements);
    const LocalTensor<float> x = in_.take(elements), y = out_.floats();
    const LocalTensor<float> squares = squares_.Get<float>(), roots = roots_.Get<float>();
    const LocalTensor<float> scale = scale_.Get<float>();
    Mul(squares, x, x, elements);
    PipeBarrier<PIPE_V>();
    for (uint32_t c = kLanes; c < width_; c += kLanes) {
      Add(squares, squares, squares[c], lanes(c), repeats, {1, 1, 1, stride, stride, stride});
      PipeBarrier<PIPE_V>();
    }
    WholeReduceSum(means_.Get<float>(), squares, lanes(0), count, 1, 1, stride);
    PipeBarrier<PIPE_V>();
    spread_roots(count);
    for (uint32_t c = 0; c < width_; c += kLanes) {
      Div(y[c], x[c], roots, lanes(c), repeats, {1, 1, 0, stride, stride, 1});
    }
    in_.give_back();
    PipeBarrier<PIPE_V>();
    for (uint32_t c = 0; c < width_; c += kLanes) {
      Mul(y[c], y[c], scale[c], lanes(c), repeats, {1, 1, 1, stride, stride, 0});
    }
    out_.store(y_[place], elements);
  }

  __aicore__ inline void normalise_row(uint32_t row) {
    const bool whole = width_ <= kColumns;
    const uint64_t place = static_cast<uint64_t>(row) * width_;
    LocalTensor<float> x;
    for (uint32_t first = 0; first < width_; first += kColumns) {
      const uint32_t count = columns(first);
      in_.fetch(x_[place + first], count);
      x = in_.take(count);
      add_squares(x, first, count);
      if (!whole) in_.give_back();
    }
    sum_squares();
    spread_roots(1);
    for (uint32_t first = 0; first < width_; first += kColumns) {
      const uint32_t count = columns(first);
      if (!whole) {
        in_.fetch(x_[place + first], count);
        in_.fetch(scale_global_[first], count);
        x = in_.take(count);
      }
      const LocalTensor<float> y = out_.floats();
      divide(y, x, count);
      in_.give_back();
      PipeBarrier<PIPE_V>();
      if (whole) {
        Mul(y, y, scale_.Get<float>(), count);
      } else {
        Mul(y, y, in_.take(count), count);
        in_.give_back();
      }
      out_.store(y_[place + first], count);
    }
  }

  // How many columns are taken together from `first` on.
  __aicore__ inline uint32_t columns(uint32_t first) {
    return width_ - first < kColumns ? width_ - first : kColumns;
  }

  __aicore__ inline void add_squares(const LocalTensor<float>& x, uint32_t first, uint32_t count) {
    const LocalTensor<float> squares = squares_.Get<float>(), more = more_squares_.Get<float>();
    if (first == 0) {
      Mul(squares, x, x, count);
    } else {
      Mul(more, x, x, count);
      PipeBarrier<PIPE_V>();
      Add(squares, squares, more, count);
    }
    PipeBarrier<PIPE_V>();
  }

  // means[0] = the sum of squares, halved until a repeat takes the rest.
  __aicore__ inline void sum_squares() {
    const LocalTensor<float> squares = squares_.Get<float>();
    uint32_t count = columns(0);
    while (count > kLanes) {
      const uint32_t kept = (count / 2 + kBlockFloats - 1) / kBlockFloats * kBlockFloats;
      Add(squares, squares, squares[kept], count - kept);
      PipeBarrier<PIPE_V>();
      count = kept;
    }
    WholeReduceSum(means_.Get<float>(), squares, count, 1, 1, 1, 1);
    PipeBarrier<PIPE_V>();
  }

  // roots[i] = sqrt(means[i] / width + epsilon) eight times, in a block of its own.
  __aicore__ inline void spread_roots(uint32_t count) {
    const LocalTensor<float> means = means_.Get<float>();
    Muls(means, means, 1.0f / static_cast<float>(width_), count);
    PipeBarrier<PIPE_V>();
    Adds(means, means, epsilon_, count);
    PipeBarrier<PIPE_V>();
    Sqrt(means, means, count);
    PipeBarrier<PIPE_V>();
    Gather(roots_.Get<float>(), means, places_.Get<int32_t>().ReinterpretCast<uint32_t>(),
           static_cast<uint32_t>(0), count * kBlockFloats);
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void divide(const LocalTensor<float>& y, const LocalTensor<float>& x,
                                uint32_t count) {
    const LocalTensor<float> root = roots_.Get<float>();
    const uint32_t repeats = count / kLanes, rest = repeats * kLanes;
    const uint8_t step = kLanes / kBlockFloats;
    if (repeats > 0) {
      Div(y, x, root, kLanes, static_cast<uint8_t>(repeats), {1, 1, 0, step, step, 0});
    }
    if (rest < count) Div(y[rest], x[rest], root, count - rest, 1, {1, 1, 0, step, step, 0});
  }

  uint32_t rows_, width_;
  float epsilon_;
  GlobalTensor<T> x_, y_, scale_global_;
  Incoming<T, kColumns> in_;
  Outgoing<T, kColumns> out_;
  TBuf<TPosition::VECCALC> scale_, scale_halves_, squares_, more_squares_, means_, roots_, places_;
};

}  // namespace tq

// The entry points, one per element type.
extern "C" __global__ __vector__ __aicore__ void tq_rms_normalization_float32(TqRmsNormalizationTiling tiling) {
  tq::run<tq::RmsNormalization<float>>(tiling);
}

extern "C" __global__ __vector__ __aicore__ void tq_rms_normalization_float16(TqRmsNormalizationTiling tiling) {
  tq::run<tq::RmsNormalization<half>>(tiling);
}
