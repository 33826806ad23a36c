// What a node of either attention operator has, plain or paged: its attributes and its tensors, checked.
//
// TurboQuantDequantAttention(query [B, H, T, D], key_cache uint8 [B, N, S, Wk],
//                            value_cache uint8 [B, N, S, Wv], past_length int64 [B] or [1],
//                            key_rotation f32 [D, Ck], key_centroids f32,
//                            value_rotation f32 [D, Cv], value_centroids f32,
//                            attention_bias (optional), head_sink [H] (optional),
//                            key_offset, value_offset f32 [P, N, D] (both or neither),
//                            new_keys, new_values [B, N, T, D] (optional),
//                            left_padding int64 [B] or [1] (optional),
//                            key_frequencies f32 [D] (optional))
//   -> [B, H, T, D]
// C is D, for prod 2 D. Of a codec that does not rotate, rotation and centroids are floats of any shape,
// and not read.
// Refuses: another shape, rank or type, rows that are narrower than the codec's, H not a multiple
// of N, a past_length that is negative or leaves fewer than T slots, a left_padding that is
// negative or above the slots, a bias that does not broadcast, more than kMaxOffsets rows of an
// offset, a window without new_keys and new_values or without room for its entries, what
// ort/rotary_input.h says. With key_frequencies, value_offset has a number of rows of its own.
//
// TurboQuantPagedDequantAttention(query [1, H, T, D], key_cache uint8 [P, S, N, Wk],
//     value_cache uint8 [P, S, N, Wv], cumulative_sequence_length int32 [R + 1],
//     past_seqlens int32 [R], block_table int32 [R, C], key_rotation, key_centroids,
//     value_rotation, value_centroids, head_sink [H] (optional), key_offset, value_offset (both or
//     neither), key_frequencies (optional))
//   -> [1, H, T, D]
// Bytes of a page are [N, S, W]. Refuses what the other one does, and what ort/paging_inputs.h says.
#pragma once

#include <cstdint>

#include "core/attention_call.h"
#include "ort/tensor.h"
#include "ort/paging_inputs.h"
#include "ort/window_inputs.h"
#include "tq/codec_spec.h"

namespace tq::ort {

struct AttentionAttributes {
  spec::Codec key, value;
  float scale, softcap;
  bool causal;
  int64_t sliding_window;
  Window window;
  PagedWindow paged_window;  // of the paged operator
};

AttentionAttributes read_attention_attributes(const Api& api, const OrtKernelInfo* info,
                                              int float_type);
AttentionAttributes read_paged_attention_attributes(const Api& api, const OrtKernelInfo* info,
                                                    int float_type);

// The tensors of one call. Only lengths, padding, frequencies and tables of pages were read: the rest
// may be on a device.
struct AttentionTensors {
  Tensor query, key_cache, value_cache, past_length;
  Tensor key_rotation, key_centroids, value_rotation, value_centroids;
  Tensor bias, sink, key_offset, value_offset, new_keys, new_values, left_padding;
  Tensor key_frequencies, output;
  int64_t batch, query_heads, heads, tokens, slots;
  int64_t bias_stride[4];  // in elements, zero where it is broadcast
  int64_t key_offsets, value_offsets;  // rows; 0 without
  bool has_rotary_offset;  // of keys
  int head_size;
  PackedRequests packed;  // of the paged operator, whose pages have `slots` slots
  int64_t key_stride, value_stride;  // likewise: bytes from a row to the next
};

AttentionTensors read_attention(const Api& api, OrtKernelContext* context,
                                const AttentionAttributes& attributes, int float_type);
AttentionTensors read_paged_attention(const Api& api, OrtKernelContext* context,
                                      const AttentionAttributes& attributes, int float_type);

}  // namespace tq::ort
