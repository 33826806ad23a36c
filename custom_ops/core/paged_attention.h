// TurboQuantPagedDequantAttention without ONNX Runtime: attention of requests whose tokens are
// packed, over caches in pages.
#pragma once

#include "core/attention_call.h"
#include "core/kernels.h"
#include "core/parallel.h"

namespace tq {

// Requests with the same number of new tokens are computed as one batch, those with one token first.
// So the split of keys over tasks depends on the other requests, but not on the pages of the rows.
// False when there was no memory for the work areas.
bool paged_attention(const Kernels& kernels, const PagedAttentionCall& call,
                     const Parallel& parallel);

}  // namespace tq
