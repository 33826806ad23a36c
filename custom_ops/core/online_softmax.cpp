// Softmax of rows over blocks; the contract is in online_softmax.h.
#include "core/online_softmax.h"

#include <algorithm>
#include <cmath>

#include "core/element.h"
#include "core/row_prefetcher.h"

namespace tq {

OnlineSoftmax::OnlineSoftmax(const Kernels& kernels, const AttentionCall& call,
                             const QueryRows& queries, const RowReader& key, const RowReader& value)
    : kernels_(kernels), call_(call), queries_(queries), key_(key), value_(value) {}

void OnlineSoftmax::start(const HeadTask& task, bool counts_sink) const {
  const std::size_t count = static_cast<std::size_t>(task.count);
  std::fill_n(task.sums, count * value_.sums_width(), 0.0f);
  std::fill_n(task.buckets, count * bucket_width(), 0.0f);
  std::fill_n(task.max, count, kNoMaximum);
  std::fill_n(task.weight, count, 0.0f);
  if (counts_sink && call_.sink != nullptr) start_from_sinks(task);
}

// A sink is a key without a value that every query sees: exp(sink - max) with max = sink.
void OnlineSoftmax::start_from_sinks(const HeadTask& task) const {
  for (int r = 0; r < task.count; ++r) {
    load_floats(kernels_, call_.element, call_.sink,
                static_cast<std::size_t>(queries_.query_head(task.n, task.first + r)), task.max + r,
                1);
    task.weight[r] = task.max[r] == kNoMaximum ? 0.0f : 1.0f;
  }
}

void OnlineSoftmax::load_fields(const RowReader& reader, const uint8_t* rows, int count,
                                float* scales, float* zeros) const {
  if (reader.has_zeros()) return reader.scales_and_zeros(rows, count, scales, zeros);
  reader.scales(rows, count, scales);
  if (has_zeros()) std::fill_n(zeros, kBlock, 0.0f);
}

void OnlineSoftmax::load_key_fields(const uint8_t* keys, const KeyBlock& block) const {
  load_fields(key_, keys, block.count, block.key_scales, block.key_zeros);
}

void OnlineSoftmax::load_value_fields(const uint8_t* values, const KeyBlock& block) const {
  if (value_.parts() > 1) {
    value_.weight_scales(values, block.count, block.value_scales);
    if (has_zeros()) std::fill_n(block.value_zeros, kBlock, 0.0f);
  } else {
    load_fields(value_, values, block.count, block.value_scales, block.value_zeros);
  }
  if (value_.parts() > 1 || value_.has_zeros() || call_.value_offsets > 0) {
    std::fill_n(block.ones, kBlock, 1.0f);
  }
}

// Both ends of what is seen rise with the row.
bool OnlineSoftmax::is_whole(const HeadTask& task, int first, int count,
                             const KeyBlock& block) const {
  const int64_t top = task.first + first;
  return call_.softcap == 0.0f && is_late(block) &&
         queries_.coded(task.b, top, task.resident).high >= block.at + block.count &&
         queries_.coded(task.b, top + count - 1, task.resident).low <= block.at &&
         has_zero_bias(task, first, count, block);
}

// Whether the bias of a block is nothing but zeros, as it is in a decode step of a model with a
// mask that hides nothing. Zeros of all element types are zero bytes.
bool OnlineSoftmax::has_zero_bias(const HeadTask& task, int first, int count,
                                  const KeyBlock& block) const {
  if (call_.bias == nullptr) return true;
  const std::size_t size = element_size(call_.element);
  const int64_t loaded = call_.bias_stride[3] == 0 ? 1 : block.count;
  int64_t before = -1;
  for (int r = first; r < first + count; ++r) {
    const int64_t offset = bias_offset(task, r, block);
    if (offset == before) continue;
    before = offset;
    const uint8_t* const bytes =
        static_cast<const uint8_t*>(call_.bias) + static_cast<std::size_t>(offset) * size;
    uint8_t any = 0;
    for (std::size_t i = 0; i < static_cast<std::size_t>(loaded) * size; ++i) any |= bytes[i];
    if (any != 0) return false;
  }
  return true;
}

int64_t OnlineSoftmax::bias_offset(const HeadTask& task, int r, const KeyBlock& block) const {
  const int64_t row = task.first + r;
  const int64_t* const stride = call_.bias_stride;
  return task.b * stride[0] + queries_.query_head(task.n, row) * stride[1] +
         queries_.token(row) * stride[2] + block.at * stride[3];
}

const float* OnlineSoftmax::load_bias(const HeadTask& task, int r, const KeyBlock& block) const {
  const int64_t offset = bias_offset(task, r, block);
  const int loaded = call_.bias_stride[3] == 0 ? 1 : block.count;
  load_floats(kernels_, call_.element, call_.bias, static_cast<std::size_t>(offset), block.bias,
              static_cast<std::size_t>(loaded));
  if (loaded == 1) std::fill_n(block.bias, kBlock, block.bias[0]);
  return block.bias;
}

void OnlineSoftmax::add_key_offsets(const HeadTask& task, const KeyBlock& block, float* scores,
                                    PrefetchRange later) const {
  const float* products = task.shifts + 1;
  if (call_.rotary_offset != nullptr) {
    call_.rotary_offset->add_to_scores(kernels_, products, shift_width(), task.count, block.at,
                                       call_.padding(task.b), block.key_scales, scores, later);
  } else {
    prefetch_now(later);
    std::fill_n(block.ones, kBlock, 1.0f);
    for (int r = 0; r < task.count; ++r, products += shift_width()) {
      std::fill_n(block.shift, kBlock, products[call_.key_offsets - 1]);
      for (int64_t at = block.at; at < std::min(block.at + kBlock, call_.key_offsets); ++at) {
        block.shift[at - block.at] = products[at];
      }
      kernels_.add_scaled(scores + r * kBlock, block.key_scales, block.shift, block.ones,
                          block.count);
    }
  }
  std::fill_n(block.key_scales, kBlock, 1.0f);
}

// What is added to the scaled scores: zero * sum(q).
const float* OnlineSoftmax::load_zeros(const HeadTask& task, int r, const KeyBlock& block) const {
  const float query_sum = task.shifts[static_cast<std::size_t>(r) * shift_width()];
  for (int t = 0; t < kBlock; ++t) block.shift[t] = block.key_zeros[t] * query_sum;
  return block.shift;
}

void OnlineSoftmax::weigh_block(const HeadTask& task, const KeyBlock& block, float* scores) const {
  for (int r = 0; r < task.count; ++r) weigh_row(task, r, block, scores + r * kBlock);
}

void OnlineSoftmax::weigh_row(const HeadTask& task, int r, const KeyBlock& block,
                              float* scores) const {
  const Range range = queries_.coded(task.b, task.first + r, task.resident);
  const int low = static_cast<int>(std::clamp<int64_t>(range.low - block.at, 0, block.count));
  const int high = static_cast<int>(std::clamp<int64_t>(range.high - block.at, 0, block.count));
  const float* const shift = key_.has_zeros() ? load_zeros(task, r, block) : nullptr;
  const float* const bias = call_.bias == nullptr ? nullptr : load_bias(task, r, block);
  const float max =
      kernels_.finish_scores(scores, block.key_scales, shift, bias, hiding_bias(call_.element),
                             call_.softcap, block.count, low, high);
  raise_maximum(task, r, max);
  // While every key so far is hidden, any finite maximum gives weights of zero.
  apply_weights(task, r, block, task.max[r] == kNoMaximum ? 0.0f : task.max[r], scores);
}

void OnlineSoftmax::raise_maximum(const HeadTask& task, int r, float max) const {
  if (!(max > task.max[r])) return;
  const float factor = std::exp(task.max[r] - max);
  task.weight[r] *= factor;
  scale_sums(task, r, factor);
  task.max[r] = max;
}

void OnlineSoftmax::scale_sums(const HeadTask& task, int r, float factor) const {
  const std::size_t row = static_cast<std::size_t>(r);
  kernels_.scale(task.sums + row * value_.sums_width(), factor, value_.sums_width());
  kernels_.scale(task.buckets + row * bucket_width(), factor, static_cast<int>(bucket_width()));
}

// From scores to what the numbers of the values are multiplied with; adds everything else that the
// weights do.
void OnlineSoftmax::apply_weights(const HeadTask& task, int r, const KeyBlock& block, float max,
                                  float* scores) const {
  if (is_late(block) && !value_.has_zeros()) {
    return add_weight(task, r, kernels_.weigh(scores, float_scales(block), block.count, max));
  }
  const float sum = kernels_.weigh(scores, block.ones, block.count, max);
  if (is_late(block)) {
    add_weight(task, r, sum);
  } else {
    task.weight[r] += sum;
    float* const buckets = task.buckets + static_cast<std::size_t>(r) * bucket_width();
    for (int t = 0; t < block.count; ++t) {
      buckets[std::min(block.at + t, call_.value_offsets - 1)] += scores[t];
    }
  }
  // What is hidden contributes nothing, even where its fields are no numbers.
  const float zeros =
      kernels_.apply_fields(scores, float_scales(block),
                            value_.has_zeros() ? block.value_zeros : nullptr, block.count, scores);
  if (value_.has_zeros()) add_to_sums(task, r, zeros);
}

void OnlineSoftmax::add_weight(const HeadTask& task, int r, float weight) const {
  task.weight[r] += weight;
  if (call_.value_offsets > 0) {
    task.buckets[static_cast<std::size_t>(r + 1) * bucket_width() - 1] += weight;
  }
}

void OnlineSoftmax::add_to_sums(const HeadTask& task, int r, float zeros) const {
  const int width = value_.sums_width();
  float* const sums = task.sums + static_cast<std::ptrdiff_t>(r) * width;
  for (int j = 0; j < width; ++j) sums[j] += zeros;
}

float OnlineSoftmax::quantise_block(const HeadTask& task, const uint8_t* values,
                                    const KeyBlock& block, float* scores, float* operands,
                                    RowSpan later) const {
  // Behind the last key: scores of -infinity, which scales of zero would make no numbers.
  std::fill_n(block.key_scales + block.count, kBlock - block.count, 1.0f);
  float prefetched = 0.0f;
  for (int first = 0; first < task.count; first += kRowsTogether) {
    const int some = std::min(kRowsTogether, task.count - first);
    if (has_whole_rows() && is_whole(task, first, some, block)) {
      const float share = std::max(prefetched, kernels_.integers->softmax_share);
      quantise_whole_rows(task, first, some, values, block, scores, operands,
                          value_.prefetch_range(later.rows, later.count, prefetched, share));
      prefetched = share;
    } else {
      for (int r = first; r < first + some; ++r) {
        quantise_row(task, r, values, block, scores, operands);
      }
    }
  }
  return prefetched;
}

void OnlineSoftmax::quantise_row(const HeadTask& task, int r, const uint8_t* values,
                                 const KeyBlock& block, float* scores, float* operands) const {
  weigh_row(task, r, block, scores + r * kBlock);
  value_.quantise(values, block.count, scores + r * kBlock, weight_scales(task, block),
                  operands + r * kOperandFloats,
                  task.sums + static_cast<std::ptrdiff_t>(r) * value_.sums_width());
}

// Of rows that see a whole block and need nothing but its scales and zeros.
void OnlineSoftmax::quantise_whole_rows(const HeadTask& task, int first, int count,
                                        const uint8_t* values, const KeyBlock& block, float* scores,
                                        float* operands, PrefetchRange prefetch) const {
  float maxima[kRowsTogether], exponentials[kRowsTogether];
  std::copy_n(task.max + first, count, maxima);
  for (int r = first; r < first + count; ++r) {
    std::fill_n(scores + r * kBlock + block.count, kBlock - block.count, kNoMaximum);
  }
  float zeros[kRowsTogether] = {};
  if (has_zeros()) {
    prefetch_now(prefetch);
    for (int i = 0; i < count; ++i) {
      const int r = first + i;
      const float query_sum = key_.has_zeros() ? task.shifts[r * shift_width()] : 0.0f;
      exponentials[i] = kernels_.integers->softmax_block_zeros(
          scores + r * kBlock, block.key_scales, block.key_zeros, query_sum,
          weight_scales(task, block), block.value_zeros, maxima + i, operands + r * kOperandFloats,
          zeros + i);
    }
  } else {
    kernels_.integers->softmax_block(scores + first * kBlock, count, block.key_scales,
                                     weight_scales(task, block), maxima, exponentials,
                                     operands + first * kOperandFloats, prefetch);
  }
  for (int i = 0; i < count; ++i) {
    const int r = first + i;
    if (std::isnan(exponentials[i])) {  // something is not finite
      quantise_row(task, r, values, block, scores, operands);
      continue;
    }
    raise_maximum(task, r, maxima[i]);
    add_weight(task, r, exponentials[i]);
    if (value_.has_zeros()) add_to_sums(task, r, zeros[i]);
  }
}

}  // namespace tq
