// Decode steps. There are few query rows, so the keys of a KV head are split into chunks, and partial
// results are merged in key order. The KV heads of all sequences go in waves, which bounds the memory.
//
// The split depends on shapes and lengths, never on threads. Chunk c has maximum m_c, weight w_c and
// sums s_c. With m the largest m_c, a row is
//   (sum of exp(m_c - m) s_c) / (sum of exp(m_c - m) w_c),  both added over rising c.
// A sink counts in chunk 0 only.
#pragma once

#include "core/attention_call.h"
#include "core/attention_rows.h"
#include "core/kernels.h"
#include "core/parallel.h"

namespace tq {

// False when there was no memory for the work areas.
bool run_decode(const Kernels& kernels, const AttentionCall& call, const AttentionRows& worker,
                const Parallel& parallel);

}  // namespace tq
