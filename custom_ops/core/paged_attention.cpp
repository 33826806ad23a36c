// Batches of requests with as many new tokens; the contract is in paged_attention.h.
#include "core/paged_attention.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "core/attention.h"

namespace tq {

bool paged_attention(const Kernels& kernels, const PagedAttentionCall& call,
                     const Parallel& parallel) {
  const auto tokens_of = [&](int64_t request) {
    return call.cumulative_lengths[request + 1] - call.cumulative_lengths[request];
  };
  const std::size_t count = static_cast<std::size_t>(call.requests);
  std::vector<int64_t> requests(count), starts(count), lengths(count);
  std::iota(requests.begin(), requests.end(), int64_t{0});
  std::stable_sort(requests.begin(), requests.end(),
                   [&](int64_t a, int64_t b) { return tokens_of(a) < tokens_of(b); });
  for (std::size_t i = 0; i < count; ++i) {
    starts[i] = call.cumulative_lengths[requests[i]];
    lengths[i] = call.past_lengths[requests[i]];
  }
  const AttentionCall& common = call.common;
  std::optional<PageWindow> window;
  if (common.window.is_on()) {
    window.emplace(common.window, common.head_size, call.page_slots, common.key.stride,
                   common.key.page_bytes);
  }
  for (std::size_t first = 0, end = 0; first < count; first = end) {
    const int32_t tokens = tokens_of(requests[first]);
    while (end < count && tokens_of(requests[end]) == tokens) ++end;
    if (tokens == 0) continue;
    const Paging paging{call.block_table,
                        call.columns,
                        call.page_slots,
                        call.cumulative_lengths[call.requests],
                        requests.data() + first,
                        starts.data() + first,
                        window.has_value() ? &*window : nullptr};
    AttentionCall batch = common;
    batch.batch = static_cast<int64_t>(end - first);
    batch.tokens = tokens;
    batch.slots = 0;
    batch.past_length = lengths.data() + first;
    batch.length_per_batch = true;
    batch.paging = &paging;
    if (!attention(kernels, batch, parallel)) return false;
  }
  return true;
}

}  // namespace tq
