// Prompts go by tiles of query rows (attention_prefill.h), decode steps by waves of KV heads
// (decode_wave.h).
#include "core/attention.h"

#include "core/attention_prefill.h"
#include "core/attention_rows.h"
#include "core/decode_wave.h"

namespace tq {

bool attention(const Kernels& kernels, const AttentionCall& call, const Parallel& parallel) {
  if (call.batch == 0 || call.query_heads == 0 || call.tokens == 0) return true;
  const AttentionRows worker(kernels, call);
  return is_prefill(worker) ? run_prefill(kernels, call, worker, parallel)
                            : run_decode(kernels, call, worker, parallel);
}

}  // namespace tq
