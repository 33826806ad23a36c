// Attention of many query rows per KV head. A task computes a tile of them against all visible keys.
#pragma once

#include "core/attention_call.h"
#include "core/attention_rows.h"
#include "core/parallel.h"

namespace tq {

// Whether there are enough query rows to share decoded blocks.
bool is_prefill(const AttentionRows& worker);

// False when there was no memory for the work areas, which do not grow with the lengths.
bool run_prefill(const Kernels& kernels, const AttentionCall& call, const AttentionRows& worker,
                 const Parallel& parallel);

}  // namespace tq
