// TurboQuantDequantAttention without ONNX Runtime.
#pragma once

#include <cstdint>

#include "core/element.h"
#include "core/kernels.h"
#include "core/parallel.h"

namespace tq {

struct CacheView {
  const uint8_t* rows;  // [B, N, S, W]
  int bits;
  const float* centroids;
  bool raw = false;  // elements (raw_element); no centroids, and the rotation is not looked at
};

// All sizes have been checked by the caller. Shapes: query and output [B, H, T, D]; the caches hold
// `slots` rows per head; strides of the bias in elements, zero where it is broadcast.
struct AttentionCall {
  Element element;
  const void* query;
  void* output;
  CacheView key, value;
  const float* key_rotation;
  const float* value_rotation_transposed;
  const int64_t* past_length;
  bool length_per_batch;
  int64_t batch, query_heads, heads, tokens, slots;
  int head_size;
  const void* bias;  // may be null
  int64_t bias_stride[4];
  const void* sink;  // [H] of the element type, may be null
  float scale, softcap;  // softcap 0: none
  bool causal;
  int64_t sliding_window;  // 0: none
};

// Works in the rotated space: <q, x'> = s <qR, c[idx]>, and the weighted sum of the values is
// un-rotated once. The result depends on the shapes and the instruction set, not on the threads.
// False when there was no memory for the work areas.
bool attention(const Kernels& kernels, const AttentionCall& call, const Parallel& parallel);

// out[j][i] = rotation[i][j].
void transpose(const float* rotation, int head_size, float* out);

}  // namespace tq
