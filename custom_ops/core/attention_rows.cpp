// Query rows through blocks of keys; the contract is in attention_rows.h.
#include "core/attention_rows.h"

#include <algorithm>
#include <cmath>

#include "core/element.h"
#include "core/rotation.h"

namespace tq {

AttentionRows::AttentionRows(const Kernels& kernels, const AttentionCall& call)
    : kernels_(kernels),
      call_(call),
      key_(make_row_reader(kernels, call.key, call.element, call.head_size)),
      value_(make_row_reader(kernels, call.value, call.element, call.head_size)),
      window_(kernels, call),
      queries_(call, window_),
      cursor_(call),
      prefetcher_(call, window_, cursor_),
      scorer_(*key_, *value_),
      softmax_(kernels, call, queries_, *key_, *value_) {}

void AttentionRows::prefetch(int64_t b, int64_t n, int64_t heads, Range keys) const {
  prefetcher_.begin(*key_, b, n, heads, keys);
  prefetcher_.begin(*value_, b, n, heads, keys);
}

void AttentionRows::attend(const HeadTask* heads, int count, Range keys, bool counts_sink,
                           float* work) const {
  for (int h = 0; h < count; ++h) softmax_.start(heads[h], counts_sink);
  const BlockWalk walk(cursor_, heads, count, keys);
  for (int64_t item = 0; item < walk.items(); ++item) attend_block(walk, item, work);
}

void AttentionRows::attend_block(const BlockWalk& walk, int64_t item, float* work) const {
  const HeadTask& task = walk.task(item);
  uint8_t* const key_copy = reinterpret_cast<uint8_t*>(work);
  uint8_t* const value_copy = reinterpret_cast<uint8_t*>(work + cursor_.copy_size());
  work += 2 * cursor_.copy_size();
  KeyBlock block = KeyBlock::in(work);
  block.at = walk.at(item);
  block.count = walk.count(item);
  float* const scores = work;
  float* const rest = scores + static_cast<std::size_t>(task.count) * kBlock;
  const auto rows_of = [&](const CacheView& cache, uint8_t* copy) {
    return cursor_.block_rows(cache, task.b, task.n, block.at, block.count, copy);
  };
  const uint8_t* const keys = rows_of(call_.key, key_copy);
  score(task, keys, block, scores, rest, prefetcher_.span_ahead(*key_, walk, item), nullptr);
  add_values(task, rows_of(call_.value, value_copy), block, scores, rest,
             prefetcher_.span_ahead(*value_, walk, item));
}

void AttentionRows::score(const HeadTask& task, const uint8_t* keys, const KeyBlock& block,
                          float* scores, float* work, RowSpan later, const uint8_t* values) const {
  const PrefetchRange rest = scorer_.score(task, keys, block.count, scores, work, later, values,
                                           call_.rotary_offset != nullptr);
  softmax_.load_key_fields(keys, block);
  if (!softmax_.has_key_offsets()) return prefetch_now(rest);
  softmax_.add_key_offsets(task, block, scores, rest);
}

void AttentionRows::add_values(const HeadTask& task, const uint8_t* values, const KeyBlock& block,
                               float* scores, float* work, RowSpan later) const {
  softmax_.load_value_fields(values, block);
  if (!value_->is_integer()) {
    softmax_.weigh_block(task, block, scores);
    return value_->accumulate(values, block.count, scores, task.count, work, task.sums);
  }
  float* const operands = work;
  const float share = softmax_.quantise_block(task, values, block, scores, operands, later);
  value_->accumulate_operands(values, block.count, operands, softmax_.pitch(task), task.count,
                              task.sums,
                              value_->prefetch_range(later.rows, later.count, share, 1.0f));
}

// Values wait until the kernels have gone kRowsAhead further with the keys: it is known by then
// which of them are to be prefetched.
void AttentionRows::attend_skipping(const HeadTask* heads, int count, Range keys, bool counts_sink,
                                    const float* exact_max, float* work) const {
  for (int h = 0; h < count; ++h) softmax_.start(heads[h], counts_sink);
  const BlockWalk walk(cursor_, heads, count, keys);
  struct Waiting {
    KeyBlock block;
    float* scores;
    const uint8_t* values;  // null where they are skipped
  } waiting[kWaiting];
  const KeyBlock arrays = KeyBlock::in(work);
  for (Waiting& place : waiting) {
    place.block = arrays;
    place.block.key_scales = work;
    place.scores = work + kBlock;
    work += (static_cast<std::size_t>(heads->count) + 1) * kBlock;
  }
  const uint8_t* to_prefetch = nullptr;  // a block of values
  for (int64_t i = 0; i < walk.items() + kWaiting - 1; ++i) {
    Waiting& scored = waiting[i % kWaiting];
    if (i < walk.items()) {
      const HeadTask& task = walk.task(i);
      scored.block.at = walk.at(i);
      scored.block.count = walk.count(i);
      const auto row_in = [&](const CacheView& cache) {
        return cursor_.row_of(cache, task.b, task.n, scored.block.at);
      };
      score(task, row_in(call_.key), scored.block, scored.scores, work,
            prefetcher_.span_ahead(*key_, walk, i), to_prefetch);
      const float* const exact =
          exact_max == nullptr ? nullptr : exact_max + i % count * task.count;
      scored.values =
          hardly_counts(task, scored.block, scored.scores, exact) ? nullptr : row_in(call_.value);
    } else {
      prefetch_now(value_->prefetch_range(to_prefetch, kBlock, 0.0f, 1.0f));
      scored.values = nullptr;
    }
    to_prefetch = nullptr;
    const Waiting& oldest = waiting[(i + 1) % kWaiting];
    if (i + 1 < kWaiting || oldest.values == nullptr) {
      to_prefetch = scored.values;
    } else {
      add_values(walk.task(i + 1 - kWaiting), oldest.values, oldest.block, oldest.scores, work,
                 {scored.values, kBlock});
    }
  }
}

bool AttentionRows::hardly_counts(const HeadTask& task, const KeyBlock& block, const float* scores,
                                  const float* exact_max) const {
  if (block.count < kBlock || !softmax_.is_whole(task, 0, task.count, block)) return false;
  const float margin = std::log(call_.skip_below);
  float limits[kDecodeRows];
  for (int r = 0; r < task.count; ++r) {
    const float exact = exact_max == nullptr ? kNoMaximum : exact_max[r];
    limits[r] = std::max(task.max[r], exact) + margin;
  }
  return !kernels_.integers->any_reaches(scores, task.count, block.key_scales, limits);
}

void AttentionRows::prepare(const int64_t* flat_rows, int count, float* scratch,
                            float* const* query, float* const* shifts, float* const* exact) const {
  const int size = call_.head_size, width = key_->coordinates();
  float* const natural = scratch;
  float* const rotated = scratch + static_cast<std::size_t>(count) * size;
  for (int r = 0; r < count; ++r) {
    load_floats(kernels_, call_.element, call_.query,
                static_cast<std::size_t>(queries_.vector_of(flat_rows[r])) * size,
                natural + r * size, static_cast<std::size_t>(size));
  }
  kernels_.scale(natural, call_.scale, count * size);
  if (spec::is_rotated(call_.key.codec.kind)) {
    rotate(kernels_, call_.key_rotation, natural, rotated, count, size, width);
  } else {
    std::copy_n(natural, count * size, rotated);
  }
  for (int r = 0; r < count; ++r) {
    key_->prepare_query(rotated + r * width, query[r]);
    window_.prepare_query(natural + r * size, exact[r]);
    if (softmax_.shift_width() == 0) continue;
    const int64_t b = flat_rows[r] / (call_.query_heads * call_.tokens);
    prepare_shifts(b, queries_.head_of(flat_rows[r]), natural + r * size, shifts[r]);
  }
}

void AttentionRows::prepare_shifts(int64_t b, int64_t head, const float* query,
                                   float* shifts) const {
  const int size = call_.head_size;
  if (softmax_.has_zeros()) {
    double sum = 0;
    for (int j = 0; j < size; ++j) sum += query[j];
    shifts[0] = static_cast<float>(sum);
  }
  if (call_.rotary_offset != nullptr) {
    return call_.rotary_offset->prepare_query(head, call_.padding(b), query, shifts + 1);
  }
  for (int64_t p = 0; p < call_.key_offsets; ++p) {
    shifts[1 + p] = dot_product(query, call_.key_offset + (p * call_.heads + head) * size, size);
  }
}

void AttentionRows::finish(const int64_t* flat_rows, int count, const float* const* sums,
                           const float* const* buckets, const float* const* exact,
                           const float* weight, float* scratch) const {
  const int size = call_.head_size, width = value_->coordinates();
  float* const natural = scratch;
  float* out = scratch + static_cast<std::size_t>(count) * width;
  for (int r = 0; r < count; ++r) {
    float* const x = natural + r * width;
    value_->natural_sums(sums[r], x);
    if (weight[r] == 0.0f) {  // every key is hidden, and there is no sink
      std::fill_n(x, width, 0.0f);
    } else {
      kernels_.divide(x, weight[r], x, width);
    }
  }
  if (spec::is_rotated(call_.value.codec.kind)) {
    unrotate(kernels_, call_.value_rotation, natural, out, count, size, width);
  } else {
    out = natural;
  }
  for (int r = 0; r < count; ++r) {
    float* const x = out + r * size;
    for (int64_t p = 0; weight[r] != 0.0f && p < call_.value_offsets; ++p) {
      const float share = buckets[r][p] / weight[r];
      if (share == 0.0f) continue;
      const int64_t head = p * call_.heads + queries_.head_of(flat_rows[r]);
      const float* const offset = call_.value_offset + head * size;
      for (int j = 0; j < size; ++j) x[j] += share * offset[j];
    }
    if (window_.is_on() && weight[r] != 0.0f) window_.add_share(exact[r], weight[r], x);
    store_floats(kernels_, call_.element, x, call_.output,
                 static_cast<std::size_t>(queries_.vector_of(flat_rows[r])) * size,
                 static_cast<std::size_t>(size));
  }
}

}  // namespace tq
