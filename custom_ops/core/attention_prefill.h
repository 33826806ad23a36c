// Attention of many query rows per KV head: a task is one tile of them against all keys they see.
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
