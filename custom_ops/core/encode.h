// TurboQuantEncode without ONNX Runtime: new vectors become rows of the cache.
#pragma once

#include <cstdint>

#include "core/element.h"
#include "core/kernels.h"
#include "core/parallel.h"
#include "core/rotary_offset.h"
#include "core/rotation.h"
#include "core/window.h"
#include "tq/codec_spec.h"

namespace tq {

// Where the rows of packed tokens go: into pages [P, S, N, W], whose bytes are [N, S, W].
struct TokenPlaces {
  const int64_t* rows;   // of the tensor, of head 0 [T]
  const int64_t* slots;  // of the token's request [T]
  int64_t page_slots;    // S: rows from one head to the next
};

// All sizes have been checked by the caller. Shapes: vectors [B, N, T, D], past [B, N, P, W],
// present [B, N, S, W] with S >= P. Present may be past itself, of the same shape: then only the
// new rows are written (and entries). Otherwise the two do not overlap.
struct EncodeCall {
  Element element;
  const void* vectors;
  const uint8_t* past;
  uint8_t* present;
  const int64_t* past_length;
  bool length_per_batch;  // else one length for all
  int64_t batch, heads, tokens, past_slots, present_slots;
  int head_size;
  int width;  // W, at least the bytes of a row
  spec::Codec codec;
  // Looked at by codecs that rotate only; prod wants both forms of the matrix.
  int norm_correction;  // 0, 1 or 2, as tq_onnx/codec/kind.py has them
  Rotation rotation;
  const float* centroids;
  const float* boundaries;
  // [offsets, N, D] or null: row min(slot, offsets - 1) is subtracted from what goes to a slot.
  const float* offset;
  int64_t offsets;
  // What is subtracted instead, by the slots behind the padding; may be null. Padding is that of each
  // sequence, or one of all; null for none.
  const RotaryOffset* rotary_offset;
  const int64_t* left_padding;
  bool padding_per_batch;
  // Rows of tokens lie behind the overlay, whose entries are written too. Tokens are fewer than
  // tags.
  Window window;
  // Of kinds that search only: what an encoder tries, in the order of preference; none for one that
  // does not. Error feedback [N], then that of a second class (core/feedback.h), in the form for
  // these kernels, or null.
  const float* gains;
  int gain_count;
  const Feedback* feedback;
  // With pages the batch is 1, past and present have `present_slots` rows in all, and there is no
  // window; nobody looks at the lengths. Else null.
  const TokenPlaces* places;

  int64_t padding(int64_t b) const {
    return left_padding == nullptr ? 0 : left_padding[padding_per_batch ? b : 0];
  }
};

void encode(const Kernels& kernels, const EncodeCall& call, const Parallel& parallel);

}  // namespace tq
