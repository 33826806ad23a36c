// What the decoder's own operators take, read and checked for the kernels of any provider. Of the
// data only position_ids and indices are read, on the host; the rest may be on a device.
//
//   RMSNormalization(X [..., E], scale [E]; epsilon) -> Y like X
//   RotaryEmbedding(X [B, N, T, D], cos_cache f32 [P, D / 2], sin_cache f32 [P, D / 2],
//                   position_ids int64 [B, T] or [1, T]) -> Y like X
//   Swish(X) -> Y like X
//   Transpose(X [B, A, C, E]; perm = 0, 2, 1, 3) -> Y [B, C, A, E]
//   Gather(data [V, E], indices int64 [T] or [B, T]) -> Y [T, E] or [B, T, E]
//
// Refuses: another shape, rank or type, an epsilon that is negative or not finite, another perm,
// positions outside of [0, P), indices outside of [-V, V).
#pragma once

#include "ort/custom_op.h"

namespace tq::ort {

struct RmsNormalizationTensors {
  Tensor x, scale, y;
  int64_t rows, width;
};

struct RotaryEmbeddingTensors {
  Tensor x, cosines, sines, positions, y;
  int64_t batch, heads, tokens, head_size;
  int64_t count;  // elements of X
};

struct SwishTensors {
  Tensor x, y;
  int64_t count;
};

struct TransposeTensors {
  Tensor x, y;
  int64_t batch, rows, columns;
  int64_t bytes;  // of a vector; 0 where X has no elements
};

struct GatherTensors {
  Tensor data, indices, y;
  int64_t rows, count;  // of data, and to be read
  int64_t bytes;  // of a row; 0 where Y has no elements
};

float read_epsilon(const Api& api, const OrtKernelInfo* info);
void expect_perm(const Api& api, const OrtKernelInfo* info);

RmsNormalizationTensors read_rms_normalization(const Api& api, OrtKernelContext* context,
                                               int float_type);
RotaryEmbeddingTensors read_rotary_embedding(const Api& api, OrtKernelContext* context,
                                             int float_type);
SwishTensors read_swish(const Api& api, OrtKernelContext* context, int float_type);
TransposeTensors read_transpose(const Api& api, OrtKernelContext* context, int float_type);
GatherTensors read_gather(const Api& api, OrtKernelContext* context, int float_type);

}  // namespace tq::ort
