// Pieces of float or half elements on their way through UB, where they are computed on as floats:
// there are two places for what comes in and two for what goes out, so that the transfers of the
// pieces before and behind run while one is computed on.
//
// Each place has a flag for either direction, 0 or 1: "it is filled" and "it is free". Those for
// "free" are set at the start and waited for at the end, so that every use of a place is alike.
// Flags are waited for by the pipe that has to wait, not by the scalar unit: what is written one
// after the other in the kernels runs side by side.
//
// API forms relied on: DataCopy(local, global, count) and DataCopy(global, local, count) of whole
// blocks; Cast of half -> float and float -> half with count (CAST_NONE, which rounds to nearest
// where it must). Not compiled with bisheng, not run on an NPU.
#pragma once

#include "arch.h"

namespace tq {

// How many of `total` things a task takes: few enough that every core gets some, but not below
// `least` where there are as many, and never more than `most`.
__aicore__ inline uint32_t share(uint32_t total, uint32_t least, uint32_t most) {
  const uint32_t cores = static_cast<uint32_t>(GetBlockNum());
  uint32_t each = (total - 1) / cores + 1;
  if (each < least) each = least < total ? least : total;
  return each < most ? each : most;
}

// Pieces of up to COUNT elements that come in. They are taken in the order in which they were
// fetched; one is given back before the next but one is fetched.
template <typename T, uint32_t COUNT>
class Incoming {
 public:
  __aicore__ inline void init(TPipe* pipe) {
    pipe->InitBuffer(elements_, 2 * COUNT * sizeof(T));
    if constexpr (kHalves) pipe->InitBuffer(floats_, COUNT * sizeof(float));
    for (uint32_t i = 0; i < 2; ++i) SetFlag<HardEvent::V_MTE2>(i);
  }

  __aicore__ inline void finish() {
    for (uint32_t i = 0; i < 2; ++i) WaitFlag<HardEvent::V_MTE2>(i);
  }

  // Between `open` and `close` the transfers of a piece are enqueued, to the place that `open`
  // returns and to anything else that is free when that is.
  __aicore__ inline LocalTensor<T> open() {
    WaitFlag<HardEvent::V_MTE2>(fetched_ % 2);
    return place(fetched_);
  }
  __aicore__ inline void close() {
    SetFlag<HardEvent::MTE2_V>(fetched_ % 2);
    ++fetched_;
  }

  // The next piece as floats, until it is given back or, of halves, the next one is taken.
  __aicore__ inline LocalTensor<float> take(uint32_t count) {
    WaitFlag<HardEvent::MTE2_V>(taken_ % 2);
    if constexpr (kHalves) {
      const LocalTensor<float> floats = floats_.template Get<float>();
      Cast(floats, place(taken_), RoundMode::CAST_NONE, count);
      PipeBarrier<PIPE_V>();
      return floats;
    } else {
      return place(taken_);
    }
  }

  __aicore__ inline void give_back() {
    SetFlag<HardEvent::V_MTE2>(taken_ % 2);
    ++taken_;
  }

  // Which of two places is the one that is opened, or the one that is taken.
  __aicore__ inline uint32_t opened() { return fetched_ % 2; }
  __aicore__ inline uint32_t taken() { return taken_ % 2; }

 private:
  static constexpr bool kHalves = sizeof(T) != sizeof(float);

  __aicore__ inline LocalTensor<T> place(uint32_t piece) {
    return elements_.template Get<T>()[piece % 2 * COUNT];
  }

  uint32_t fetched_ = 0, taken_ = 0;
  TBuf<TPosition::VECCALC> elements_, floats_;
};

// Pieces of up to COUNT elements that go out, one after the other.
template <typename T, uint32_t COUNT>
class Outgoing {
 public:
  __aicore__ inline void init(TPipe* pipe) {
    pipe->InitBuffer(elements_, 2 * COUNT * sizeof(T));
    if constexpr (kHalves) pipe->InitBuffer(floats_, COUNT * sizeof(float));
    for (uint32_t i = 0; i < 2; ++i) SetFlag<HardEvent::MTE3_V>(i);
  }

  __aicore__ inline void finish() {
    for (uint32_t i = 0; i < 2; ++i) WaitFlag<HardEvent::MTE3_V>(i);
  }

  // Where the vector unit writes the next piece, as floats.
  __aicore__ inline LocalTensor<float> floats() {
    WaitFlag<HardEvent::MTE3_V>(stored_ % 2);
    if constexpr (kHalves) return floats_.template Get<float>();
    else return place();
  }

  // Between `open` and `close` the transfers of the piece that was written are enqueued, from the
  // place that `open` returns.
  __aicore__ inline LocalTensor<T> open(uint32_t count) {
    if constexpr (kHalves) {
      PipeBarrier<PIPE_V>();
      Cast(place(), floats_.template Get<float>(), RoundMode::CAST_NONE, count);
    }
    SetFlag<HardEvent::V_MTE3>(stored_ % 2);
    WaitFlag<HardEvent::V_MTE3>(stored_ % 2);
    return place();
  }
  __aicore__ inline void close() {
    SetFlag<HardEvent::MTE3_V>(stored_ % 2);
    ++stored_;
  }

 private:
  static constexpr bool kHalves = sizeof(T) != sizeof(float);

  __aicore__ inline LocalTensor<T> place() {
    return elements_.template Get<T>()[stored_ % 2 * COUNT];
  }

  uint32_t stored_ = 0;
  TBuf<TPosition::VECCALC> elements_, floats_;
};

}  // namespace tq
