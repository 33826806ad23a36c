// TurboQuantEncode without ONNX Runtime: new vectors become rows of the cache.
#pragma once

#include <cstdint>

#include "core/element.h"
#include "core/kernels.h"
#include "core/parallel.h"

namespace tq {

// All sizes have been checked by the caller. Shapes: vectors [B, N, T, D], past [B, N, P, W],
// present [B, N, S, W] with S >= P. Present may be past itself, of the same shape: then only the
// new rows are written. Otherwise the two do not overlap.
struct EncodeCall {
  Element element;
  const void* vectors;
  const uint8_t* past;
  uint8_t* present;
  const int64_t* past_length;
  bool length_per_batch;  // else one length for all
  int64_t batch, heads, tokens, past_slots, present_slots;
  int head_size, bits;
  bool raw;  // rows are the vectors themselves (raw_element), and what follows is not looked at
  bool norm_correction;
  const float* rotation;
  const float* centroids;
  const float* boundaries;
};

void encode(const Kernels& kernels, const EncodeCall& call, const Parallel& parallel);

}  // namespace tq
