// Many query rows against a decoded block: products, the online softmax and products again for
// kTileM rows at a time, whose scores stay in the first cache. A row does not depend on the rows
// beside it: a score is one chain of products, positions that it does not see weigh zero.

namespace {

TQ_INLINE int round_down(int n) { return n / kLanes * kLanes; }
TQ_INLINE int round_up(int n) { return round_down(n + kLanes - 1); }

// Scores [from, to) times their scales, -infinity outside [low, high); the maximum, NaN passed
// over.
template <bool MASKED>
TQ_INLINE float scale_scores(float* scores, const float* scales, int from, int to, int low,
                             int high) {
  const V hidden = set1(-__builtin_huge_valf());
  V top = hidden;
  for (int t = from; t < to; t += kLanes) {
    V score = mul(load(scores + t), load(scales + t));
    if (MASKED) score = select(lanes_between(low - t, high - t), score, hidden);
    store(scores + t, score);
    top = max(score, top);
  }
  return lane_max(top);
}

// Scores become weights; the sum of the exponentials.
TQ_INLINE float exponentiate(float* scores, const float* scales, int from, int to,
                             float max_score) {
  const V top = set1(max_score);
  V sum = zero();
  for (int t = from; t < to; t += kLanes) {
    const V weight = exponential(sub(load(scores + t), top));
    sum = add(sum, weight);
    // A key that contributes nothing contributes nothing even where its scale is not a number.
    const V scaled = mul(weight, load(scales + t));
    store(scores + t, select(less_equal(weight, zero()), zero(), scaled));
  }
  return lane_sum(sum);
}

// Factor of what a row has summed up when its maximum rises.
TQ_INLINE float decay(float from, float to) {
  float factors[kLanes];
  store(factors, exponential(set1(from - to)));
  return factors[0];
}

// The tokens that any of some rows sees: [first, last), in whole vectors [from, to).
struct Seen {
  int first, last, from, to;
};

template <int ROWS>
TQ_INLINE Seen find_seen(const int* low, const int* high) {
  Seen seen{kPrefillBlock, 0, 0, 0};
  for (int r = 0; r < ROWS; ++r) {
    if (low[r] >= high[r]) continue;
    seen.first = smaller(seen.first, low[r]);
    seen.last = seen.last < high[r] ? high[r] : seen.last;
  }
  seen.from = round_down(seen.first);
  seen.to = round_up(seen.last);
  return seen;
}

// One step of the online softmax: scores become weights.
TQ_INLINE void softmax_row(float* scores, const float* key_scales, const float* value_scales,
                           int from, int to, int low, int high, float* max_score, float* weight,
                           float* sums, int width) {
  const bool sees_all = low <= from && high >= to;
  const float top = sees_all ? scale_scores<false>(scores, key_scales, from, to, 0, 0)
                             : scale_scores<true>(scores, key_scales, from, to, low, high);
  if (top > *max_score) {
    const float factor = decay(*max_score, top);
    *weight *= factor;
    scale(sums, factor, width);
    *max_score = top;
  }
  // While every key so far is hidden, any finite maximum gives weights of zero.
  const bool has_none = *max_score == -__builtin_huge_valf();
  *weight += exponentiate(scores, value_scales, from, to, has_none ? 0.0f : *max_score);
}

template <int ROWS>
void attend_strip(const PrefillBlock& block, const float* query, const int* low, const int* high,
                  float* max_scores, float* weights, float* sums) {
  const Seen seen = find_seen<ROWS>(low, high);
  if (seen.first >= seen.last) return;
  alignas(64) float scores[ROWS * kPrefillBlock];
  for (int at = 0; at < kPrefillBlock; at += kBlock) {
    const int begin = seen.from > at ? seen.from : at, end = smaller(seen.to, at + kBlock);
    if (begin >= end) continue;
    const float* const keys = block.keys + static_cast<ptrdiff_t>(at) * block.key_width;
    multiply_rows<ROWS>(query, block.key_width, keys + (begin - at), kBlock, scores + begin,
                        kPrefillBlock, end - begin, block.key_width, false);
  }
  for (int r = 0; r < ROWS; ++r) {
    softmax_row(scores + r * kPrefillBlock, block.key_scales, block.value_scales, seen.from,
                seen.to, low[r], high[r], max_scores + r, weights + r,
                sums + static_cast<ptrdiff_t>(r) * block.value_width, block.value_width);
  }
  multiply_rows<ROWS>(scores + seen.first, kPrefillBlock,
                      block.values + static_cast<ptrdiff_t>(seen.first) * block.value_width,
                      block.value_width, sums, block.value_width, block.value_width,
                      seen.last - seen.first, true);
}

void attend_block(const PrefillBlock& block, const float* query, int rows, const int* low,
                  const int* high, float* max_scores, float* weights, float* sums) {
  int r = 0;
  const auto strip = [&](auto count) {
    constexpr int kCount = decltype(count)::value;
    attend_strip<kCount>(block, query + static_cast<ptrdiff_t>(r) * block.key_width, low + r,
                         high + r, max_scores + r, weights + r,
                         sums + static_cast<ptrdiff_t>(r) * block.value_width);
    r += kCount;
  };
  while (r + kTileM <= rows) strip(Number<kTileM>{});
  while (r < rows) strip(Number<1>{});
}

}  // namespace
