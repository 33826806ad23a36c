// What a node of either encoder has, plain or paged: its tensors, checked.
//
// TurboQuantEncode(vectors [B, N, T, D], past uint8 [B, N, P, W], past_length int64 [B] or [1],
//                  rotation f32 [D, C], centroids f32 [L], boundaries f32 [L - 1],
//                  offset f32 [O, N, D], gains f32 [G], feedback f32 [N, D, D],
//                  frequencies f32 [D], left_padding int64 [B] or [1] (all optional))
//   -> present uint8 [B, N, S, W],  S = max(P, overlay_rows + max_b(past_length[b]) + T)
// C is D, for prod 2 D. Of a codec that does not rotate, rotation, centroids and boundaries are floats
// of any shape, and not read; likewise gains and feedback of one that does not search. A feedback of
// one number is none.
// Refuses: another shape, rank or type, rows that are narrower than the codec's, a past_length that is
// negative or beyond P, a present that overlaps past without being the same buffer of the same shape,
// more than kMaxOffsets rows of an offset, no gain or more than spec::kMaxGains, a window without room
// for its entries, what ort/rotary_input.h says; with frequencies a left_padding that is negative or
// above the slots.
//
// TurboQuantPagedEncode(vectors [1, N, T, D], past uint8 [P, S, N, W],
//     cumulative_sequence_length int32 [R + 1], past_seqlens int32 [R], block_table int32 [R, C],
//     rotation, centroids, boundaries, offset, gains, feedback, frequencies (the last four optional))
//   -> present uint8 [P, S, N, W]
// Bytes of a page are [N, S, W]. Refuses what the other one does, a present that overlaps past without
// being the same buffer, and what ort/paging_inputs.h says.
#pragma once

#include <cstdint>

#include "core/window.h"
#include "ort/paging_inputs.h"
#include "ort/tensor.h"
#include "ort/window_inputs.h"
#include "tq/codec_spec.h"

namespace tq::ort {

// The tensors of one call. Only lengths, padding, frequencies and tables of pages were read: the rest
// may be on a device.
struct EncodeTensors {
  Tensor vectors, past, past_length, rotation, centroids, boundaries, offset, gains, feedback;
  Tensor frequencies, left_padding;  // padding only with frequencies
  Tensor present;
  int64_t batch, heads, tokens;
  int64_t slots, total;  // of past and of present; without pages
  int64_t offsets;
  bool has_rotary_offset;
  int head_size, width;
  int gain_count;
  bool has_feedback;
  PackedRequests packed;  // of the paged operator
  int64_t page_slots, page_bytes;  // likewise; bytes of a head, and `width` those from row to row

  bool in_place() const { return present.data == past.data && total == slots; }
};

EncodeTensors read_encode(const Api& api, OrtKernelContext* context, spec::Codec codec,
                          const Window& window, int float_type);
EncodeTensors read_paged_encode(const Api& api, OrtKernelContext* context, spec::Codec codec,
                                const PagedWindow& window, int float_type);

int read_norm_correction(const Api& api, const OrtKernelInfo* info, const char* op);

}  // namespace tq::ort
