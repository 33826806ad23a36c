// TurboQuantPagedDequantAttention without ONNX Runtime: attention of requests whose tokens are
// packed, over caches in pages.
#pragma once

#include "core/attention_call.h"
#include "core/kernels.h"
#include "core/parallel.h"

namespace tq {

// Requests with as many new tokens as others go together, those with one token first: their work is
// spread over threads as that of one batch. So how keys are split depends on who goes together, but
// not on the pages where rows lie. False when there was no memory for the work areas.
bool paged_attention(const Kernels& kernels, const PagedAttentionCall& call,
                     const Parallel& parallel);

}  // namespace tq
