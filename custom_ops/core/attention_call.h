// The arguments of an attention call: caches, other tensors, and which keys a query sees.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/element.h"
#include "core/paging.h"
#include "core/planes.h"
#include "core/rotary_offset.h"
#include "core/rotation.h"
#include "core/window.h"
#include "tq/codec_spec.h"

namespace tq {

struct CacheView {
  const uint8_t* rows;  // [B, N, S, W], or pages [P, N, S, W]
  spec::Codec codec;
  int stride;  // from a row to the next, at least the bytes of a row; W without pages
  const float* centroids;  // not looked at without rotation
  const uint8_t* end = nullptr;  // of the bytes that may be read, if they are known
  int64_t page_bytes = 0;  // of a head in a page; only with pages
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
  Rotation key_rotation;  // its matrix, or the fast form; not looked at by codecs without
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
  float skip_below;  // see AttentionRows; 0: nothing is skipped
  bool causal;
  int64_t sliding_window;  // 0: none
  // [P, N, D]: what is added to the keys and values of slot s is row min(s, P - 1). P is at most
  // kMaxOffsets, 0 without.
  const float* key_offset;
  const float* value_offset;
  int64_t key_offsets, value_offsets;
  // What is added to keys instead, by the slots behind the padding; may be null.
  const RotaryOffset* rotary_offset;
  // Rows of the caches begin behind the overlay: slots are overlay rows and rows of tokens. With
  // entries the vectors of the call [B, N, T, D] are there, and tokens fewer than tags.
  Window window;
  const void* new_keys;
  const void* new_values;
  // With pages, the caches are [P, S, N, W], query and output [1, H, packed, D], vectors of the call
  // [1, N, packed, D]; there is no bias, and nobody looks at `slots`. Else null.
  const Paging* paging;

  int64_t past(int64_t b) const { return past_length[length_per_batch ? b : 0]; }
  int64_t padding(int64_t b) const {
    return left_padding == nullptr ? 0 : left_padding[padding_per_batch ? b : 0];
  }
  int64_t group() const { return query_heads / heads; }  // query heads of a KV head
};

inline Planes planes_of(const AttentionCall& call, const CacheView& cache) {
  return {cache.codec, call.head_size, call.heads, call.slots, call.window.overlay_rows};
}

// The rows of a head, the overlay in front of them, or the overlay alone; only without pages.
inline const uint8_t* lane_of(const AttentionCall& call, const CacheView& cache, int64_t b,
                              int64_t n) {
  return cache.rows + (call.window.has_planes ? planes_of(call, cache).overlay(b, n)
                                        : (b * call.heads + n) * call.slots * cache.stride);
}

// The bytes of a head in the page of a token; with pages only.
inline const uint8_t* page_of(const AttentionCall& call, const CacheView& cache, int64_t b,
                              int64_t n, int64_t token) {
  return cache.rows + (call.paging->page(b, token) * call.heads + n) * cache.page_bytes;
}

// Paged attention: requests whose tokens are packed. All sizes, and all pages that tokens need, have
// been checked by the caller.
struct PagedAttentionCall {
  // What all requests have in common; batch, tokens, lengths, slots and paging are not looked at.
  // Query and output are [1, H, T, D], the caches [P, S, N, W].
  AttentionCall common;
  int64_t requests;  // R
  const int32_t* cumulative_lengths;  // [R + 1]
  const int32_t* past_lengths;  // [R]
  const int32_t* block_table;  // [R, columns]
  int64_t columns, page_slots;
};

// Maximum of a query row whose keys are all hidden so far.
inline constexpr float kNoMaximum = -std::numeric_limits<float>::infinity();

// Tokens low .. high.
struct Range {
  int64_t low, high;
};

// Keys that a new token of sequence `b` sees, by its position alone; both ends rise with the token.
inline Range visible_range(const AttentionCall& call, int64_t b, int64_t token) {
  const int64_t position = call.past(b) + token;
  Range range{0, call.causal ? position + 1 : call.past(b) + call.tokens};
  if (call.sliding_window > 0) {
    range.low = std::max<int64_t>(0, position - call.sliding_window + 1);
  }
  range.low = std::min(std::max(range.low, call.padding(b)), range.high);
  return range;
}

// Tokens of one KV head of one sequence whose exact vectors are resident without a gap: those before
// `sinks`, and those from `recent` on.
struct ResidentTokens {
  int64_t sinks, recent;
};
inline constexpr ResidentTokens kNoResidentTokens{0, std::numeric_limits<int64_t>::max()};

}  // namespace tq
