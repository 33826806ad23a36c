// TurboQuantPagedDequantAttention without ONNX Runtime: attention of requests whose tokens are
// packed, over caches in pages.
#pragma once

#include <cstdint>

#include "core/attention.h"
#include "core/kernels.h"
#include "core/parallel.h"

namespace tq {

// All sizes, and all pages that tokens need, have been checked by the caller.
struct PagedAttentionCall {
  // What all requests have in common; batch, tokens, lengths, slots and paging are not looked at.
  // Query and output are [1, H, T, D], the caches [P, S, N, W].
  AttentionCall common;
  int64_t requests;                   // R
  const int32_t* cumulative_lengths;  // [R + 1]
  const int32_t* past_lengths;        // [R]
  const int32_t* block_table;         // [R, columns]
  int64_t columns, page_slots;
};

// Requests with as many new tokens as others go together, those with one token first: their work is
// spread over threads as that of one batch. So how keys are split depends on who goes together, but
// not on the pages where rows lie. False when there was no memory for the work areas.
bool paged_attention(const Kernels& kernels, const PagedAttentionCall& call,
                     const Parallel& parallel);

}  // namespace tq
