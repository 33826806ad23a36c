// Decode steps: few query rows, so the keys of a KV head are split too, and partial results are merged
// in key order. KV heads of all sequences go in waves, which bounds the memory.
//
// The split depends on the shapes and lengths, never on the threads. Chunk c of the keys has maximum
// m_c, weight w_c and sums s_c; with m the largest m_c a row is
//   (sum of exp(m_c - m) s_c) / (sum of exp(m_c - m) w_c),  both added over rising c.
// A sink counts in chunk 0 alone.
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
