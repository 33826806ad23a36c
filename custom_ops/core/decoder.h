// The decoder's own operators without ONNX Runtime: RMSNormalization, RotaryEmbedding, Swish,
// Transpose and Gather. Arithmetic is in float32, rounded once at the end.
//
// All sizes, positions and indices have been checked by the caller; outputs overlap no input.
#pragma once

#include <cstdint>

#include "core/element.h"
#include "core/kernels.h"
#include "core/parallel.h"

namespace tq {

// y = x / sqrt(mean(x^2) + epsilon) * scale of each row of x [rows, width].
struct RmsNormalizationCall {
  Element element;
  const void* x;
  const void* scale;  // [width]
  void* y;
  int64_t rows, width;
  float epsilon;
};

// y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin of the halves of each vector of x [B, N, T, D].
struct RotaryEmbeddingCall {
  Element element;
  const void* x;
  const float* cosines;  // [P, D / 2]
  const float* sines;
  const int64_t* positions;  // [B, T] or [1, T]
  bool positions_per_batch;
  void* y;
  int64_t batch, heads, tokens, head_size;
};

// y = x / (1 + exp(-x))
struct SwishCall {
  Element element;
  const void* x;
  void* y;
  int64_t count;
};

// x [batch, rows, columns, bytes] to y [batch, columns, rows, bytes].
struct TransposeCall {
  const uint8_t* x;
  uint8_t* y;
  int64_t batch, rows, columns, bytes;
};

// The rows of data [rows, bytes] whose numbers are the indices; from the end where negative.
struct GatherCall {
  const uint8_t* data;
  const int64_t* indices;
  uint8_t* y;
  int64_t rows, bytes, count;
};

void rms_normalization(const Kernels& kernels, const RmsNormalizationCall& call,
                       const Parallel& parallel);
void rotary_embedding(const Kernels& kernels, const RotaryEmbeddingCall& call,
                      const Parallel& parallel);
void swish(const Kernels& kernels, const SwishCall& call, const Parallel& parallel);
void transpose(const TransposeCall& call, const Parallel& parallel);
void gather(const GatherCall& call, const Parallel& parallel);

}  // namespace tq
