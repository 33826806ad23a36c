// TurboQuantEncode without ONNX Runtime: new vectors become rows of the cache.
#pragma once

#include <cstdint>

#include "core/element.h"
#include "core/kernels.h"
#include "core/page_window.h"
#include "core/parallel.h"
#include "core/planes.h"
#include "core/rotary_offset.h"
#include "core/rotation.h"
#include "core/window.h"
#include "tq/codec_spec.h"

namespace tq {

// Where packed tokens go: into pages [P, S, N, W], whose bytes are [N, S, W]. Rows may be narrower than
// W (core/page_window.h).
struct TokenPlaces {
  const int64_t* rows;   // the first byte of the row of head 0 in present [T]
  const int64_t* slots;  // of the token's request [T]
  int64_t page_bytes;    // S * W: bytes from one head to the next
  int64_t bytes;         // of all pages
  // What entries want of R requests; they have none without a window.
  const PageWindow* window;
  int64_t requests;
  const int32_t* cumulative_lengths;  // [R + 1]
  const int32_t* past_lengths;        // [R]
  const int32_t* block_table;         // [R, columns]
  int64_t columns;
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
  int width;  // from a row to the next, at least the bytes of a row; W without pages
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
  // does not. Error feedback [N] (core/feedback.h), in the form for these kernels, or null.
  const float* gains;
  int gain_count;
  const Feedback* feedback;
  // With pages the batch is 1, and nobody looks at the lengths, nor at the slots and the window. Else
  // null.
  const TokenPlaces* places;

  Planes planes(int64_t slots) const {
    return {codec, head_size, heads, slots, window.overlay_rows};
  }
  // The first byte of the rows of lane b * N + n, the overlay in front of them, or of the overlay alone.
  int64_t lane_begin(int64_t lane, int64_t slots) const {
    return window.has_planes ? planes(slots).overlay(lane / heads, lane % heads)
                             : lane * slots * width;
  }
  int64_t padding(int64_t b) const {
    return left_padding == nullptr ? 0 : left_padding[padding_per_batch ? b : 0];
  }
};

void encode(const Kernels& kernels, const EncodeCall& call, const Parallel& parallel);

}  // namespace tq
