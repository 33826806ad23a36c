// TurboQuantDequantAttention without ONNX Runtime.
#pragma once

#include <cstdint>

#include "core/element.h"
#include "core/kernels.h"
#include "core/paging.h"
#include "core/parallel.h"
#include "core/rotation.h"
#include "core/window.h"
#include "tq/codec_spec.h"

namespace tq {

struct CacheView {
  const uint8_t* rows;  // [B, N, S, W]
  spec::Codec codec;
  int stride;              // W, at least the bytes of a row
  const float* centroids;  // not looked at without rotation
  const uint8_t* end = nullptr;  // of the bytes that may be read, if they are known
};

// Most rows of an offset.
inline constexpr int64_t kMaxOffsets = 64;

// All sizes have been checked by the caller. Shapes: query and output [B, H, T, D]; the caches hold
// `slots` rows per head; strides of the bias in elements, zero where it is broadcast.
struct AttentionCall {
  Element element;
  const void* query;
  void* output;
  CacheView key, value;
  Rotation key_rotation;    // its matrix, or the fast form; not looked at by codecs without
  Rotation value_rotation;  // its transposed matrix, or the fast form
  const int64_t* past_length;
  bool length_per_batch;
  // How many of the first slots no query sees; null for none.
  const int64_t* left_padding;
  bool padding_per_batch;
  int64_t batch, query_heads, heads, tokens, slots;
  int head_size;
  const void* bias;  // may be null
  int64_t bias_stride[4];
  const void* sink;  // [H] of the element type, may be null
  float scale, softcap;  // softcap 0: none
  float skip_below;      // see AttentionRows; 0: nothing is skipped
  bool causal;
  int64_t sliding_window;  // 0: none
  // [P, N, D], both or neither: what is added to the keys and values of slot s is row
  // min(s, P - 1).
  const float* key_offset;
  const float* value_offset;
  int64_t offsets;  // P, at most kMaxOffsets; 0 without
  // Rows of the caches begin behind the overlay: slots are overlay rows and rows of tokens. With
  // entries the vectors of the call [B, N, T, D] are there, and tokens fewer than tags.
  Window window;
  const void* new_keys;
  const void* new_values;
  // With pages, the caches are [P, S, N, W], query and output [1, H, packed, D]; there is neither a
  // bias nor a window, and nobody looks at `slots`. Else null.
  const Paging* paging;
};

// Works in the rotated space: <q, x'> = s <qR, c[idx]>, and the weighted sum of the values is
// un-rotated once. The result depends on the shapes and the instruction set, not on the threads.
// False when there was no memory for the work areas.
bool attention(const Kernels& kernels, const AttentionCall& call, const Parallel& parallel);

}  // namespace tq
