// One set of query rows: rotation, online softmax over blocks of keys, un-rotation. The contract is
// in attention_rows.h.
#include "core/attention_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace tq {

AttentionRows::AttentionRows(const Kernels& kernels, const AttentionCall& call)
    : kernels_(kernels),
      call_(call),
      key_(kernels, call.key, call.element, call.head_size),
      value_(kernels, call.value, call.element, call.head_size),
      window_(kernels, call),
      group_(call.query_heads / call.heads),
      rows_(group_ * call.tokens) {}

void AttentionRows::attend(const Rows* heads, int count, Range keys, bool counts_sink,
                           float* work) const {
  for (int h = 0; h < count; ++h) start(heads[h], counts_sink);
  const Walk walk(*this, heads, count, keys);
  for (int64_t item = 0; item < walk.items(); ++item) attend_block(walk, item, work);
}

void AttentionRows::start(const Rows& rows, bool counts_sink) const {
  const std::size_t count = static_cast<std::size_t>(rows.count);
  std::fill_n(rows.sums, count * sums_width(), 0.0f);
  std::fill_n(rows.buckets, count * bucket_width(), 0.0f);
  std::fill_n(rows.max, count, kNoMaximum);
  std::fill_n(rows.weight, count, 0.0f);
  if (counts_sink && call_.sink != nullptr) start_from_sinks(rows);
}

// The entries of a window lie in front of the first key.
AttentionRows::Run AttentionRows::run_of(int64_t b, int64_t n, const AtHand& hand) const {
  const Range keys = coded(b, 0, rows_ - 1, hand);
  const bool has_entries = window_.is_on() && keys.low < kRowsAhead;
  const int64_t first = has_entries ? -call_.window.overlay_rows : keys.low;
  return {b, n, first, keys.high - first};
}

AttentionRows::Later AttentionRows::later(const CacheRows& cache, const Walk& walk,
                                          int64_t item) const {
  const Rows& rows = walk.rows(item + kItemsAhead);
  const int64_t then = walk.at(item + kItemsAhead);
  if (copies()) {  // the rows of a block lie in several places
    ask(cache, rows.b, rows.n, {then, std::min(then + kBlock, rows.end)});
    return {nullptr, 0};
  }
  if (then < rows.end) return rows_from(cache, rows.b, rows.n, then, rows.end - then);
  const int64_t skipped = (then - rows.end) / kBlock * kBlock;
  const Run& next = rows.next;
  if (skipped >= next.count) return {nullptr, 0};
  return rows_from(cache, next.b, next.n, next.first + skipped, next.count - skipped);
}

AttentionRows::Later AttentionRows::rows_from(const CacheRows& cache, int64_t b, int64_t n,
                                              int64_t token, int64_t count) const {
  int64_t some = std::min<int64_t>(kBlock, count);
  if (call_.paging != nullptr) some = std::min(some, call_.paging->together(token));
  return {cache.row(row_of(b, n, token)), static_cast<int>(some)};
}

void AttentionRows::prefetch(int64_t b, int64_t n, int64_t heads, Range keys) const {
  const int64_t asked = (kItemsAhead + heads - 1) / heads * kBlock;  // of each head
  for (const CacheRows* const cache : {&key_, &value_}) {
    for (int64_t h = 0; h < std::min<int64_t>(heads, kItemsAhead); ++h) {
      ask(*cache, b, n + h, {keys.low, std::min(keys.high, keys.low + asked)});
    }
  }
}

void AttentionRows::ask(const CacheRows& cache, int64_t b, int64_t n, Range keys) const {
  for (int64_t at = keys.low; at < keys.high;) {
    const Later rows = rows_from(cache, b, n, at, keys.high - at);
    CacheRows::ask(cache.part_of(rows.rows, rows.count, 0.0f, 1.0f));
    at += rows.count;
  }
}

const uint8_t* AttentionRows::block_rows(const CacheView& cache, int64_t b, int64_t n, int64_t at,
                                         int count, uint8_t* copy) const {
  if (!copies()) return cache.rows + row_of(b, n, at) * cache.stride;
  for (int64_t some = 0, done = 0; done < count; done += some) {
    some = std::min(call_.paging->together(at + done), count - done);
    std::memcpy(copy + done * cache.stride, cache.rows + row_of(b, n, at + done) * cache.stride,
                static_cast<std::size_t>(some * cache.stride));
  }
  return copy;
}

// A sink is a key without a value that every query sees: exp(sink - max) with max = sink.
void AttentionRows::start_from_sinks(const Rows& rows) const {
  for (int r = 0; r < rows.count; ++r) {
    load_floats(kernels_, call_.element, call_.sink,
                static_cast<std::size_t>(query_head(rows.n, rows.first + r)), rows.max + r, 1);
    rows.weight[r] = rows.max[r] == kNoMaximum ? 0.0f : 1.0f;
  }
}

AttentionRows::Block AttentionRows::block_at(int64_t at, int count, float*& work) const {
  const auto take = [&work](int arrays = 1) {
    float* const taken = work;
    work += arrays * kBlock;
    return taken;
  };
  return {at, count, take(), take(), take(), take(), take(), take(), take(kMaxParts)};
}

void AttentionRows::attend_block(const Walk& walk, int64_t item, float* work) const {
  const Rows& rows = walk.rows(item);
  const int64_t at = walk.at(item);
  const int count = walk.count(item);
  uint8_t* const key_copy = reinterpret_cast<uint8_t*>(work);
  uint8_t* const value_copy = reinterpret_cast<uint8_t*>(work + copy_size());
  work += 2 * copy_size();
  const Block block = block_at(at, count, work);
  float* const scores = work;
  float* const decoded = scores + static_cast<std::size_t>(rows.count) * kBlock;
  const uint8_t* const keys = block_rows(call_.key, rows.b, rows.n, at, count, key_copy);
  score(rows, keys, block, scores, decoded, later(key_, walk, item), nullptr);
  const uint8_t* const values = block_rows(call_.value, rows.b, rows.n, at, count, value_copy);
  add_values(rows, values, block, scores, decoded, later(value_, walk, item));
}

// Values wait until the kernels have gone kRowsAhead further with the keys: it is known by then
// which of them memory is to be asked for.
void AttentionRows::attend_skipping(const Rows* heads, int count, Range keys, bool counts_sink,
                                    const float* exact_max, float* work) const {
  for (int h = 0; h < count; ++h) start(heads[h], counts_sink);
  const Walk walk(*this, heads, count, keys);
  struct Waiting {
    Block block;
    float* scores;
    const uint8_t* values;  // null where they are skipped
  } waiting[kWaiting];
  const Block arrays = block_at(0, 0, work);
  for (Waiting& one : waiting) {
    one.block = arrays;
    one.block.key_scales = work;
    one.scores = work + kBlock;
    work += (static_cast<std::size_t>(heads->count) + 1) * kBlock;
  }
  float* const decoded = work;
  const float margin = std::log(call_.skip_below);
  float limits[kDecodeRows];
  const uint8_t* unasked = nullptr;  // values that memory is to be asked for
  for (int64_t i = 0; i < walk.items() + kWaiting - 1; ++i) {
    Waiting& scored = waiting[i % kWaiting];
    if (i < walk.items()) {
      const Rows& rows = walk.rows(i);
      scored.block.at = walk.at(i);
      scored.block.count = walk.count(i);
      const int64_t row = row_of(rows.b, rows.n, scored.block.at);
      scored.values = value_.row(row);
      score(rows, key_.row(row), scored.block, scored.scores, decoded, later(key_, walk, i),
            unasked);
      if (scored.block.count == kBlock && is_whole(rows, 0, rows.count, scored.block)) {
        for (int r = 0; r < rows.count; ++r) {
          const float exact = exact_max == nullptr ? kNoMaximum : exact_max[r];
          limits[r] = std::max(rows.max[r], exact) + margin;
        }
        if (!kernels_.integers->any_reaches(scored.scores, rows.count, scored.block.key_scales,
                                            limits)) {
          scored.values = nullptr;
        }
      }
    } else {
      CacheRows::ask(value_.part_of(unasked, kBlock, 0.0f, 1.0f));
      scored.values = nullptr;
    }
    unasked = nullptr;
    const Waiting& oldest = waiting[(i + 1) % kWaiting];
    if (i + 1 < kWaiting || oldest.values == nullptr) {
      unasked = scored.values;
    } else {
      add_values(walk.rows(i + 1 - kWaiting), oldest.values, oldest.block, oldest.scores, decoded,
                 {scored.values, kBlock});
    }
  }
}

// Asks memory for later keys and for the rows `values`, which may be null.
void AttentionRows::score(const Rows& rows, const uint8_t* keys, const Block& block, float* scores,
                          float* decoded, Later later, const uint8_t* values) const {
  if (values == nullptr || block.count < kBlock) {
    key_.score(keys, block.count, rows.query, rows.count, decoded, scores,
               key_.part_of(later.rows, later.count, 0.0f, kScoreShare));
    // Other products have asked for what they read next.
    if (key_.is_integer()) {
      CacheRows::ask(key_.part_of(later.rows, later.count, kScoreShare, 1.0f));
    }
    CacheRows::ask(value_.part_of(values, block.count, 0.0f, 1.0f));
  } else {
    constexpr int kHalf = kBlock / 2;
    key_.score(keys, kHalf, rows.query, rows.count, decoded, scores,
               key_.part_of(later.rows, later.count, 0.0f, 1.0f));
    key_.score(key_.behind(keys, kHalf), kHalf, rows.query, rows.count, decoded, scores + kHalf,
               value_.part_of(values, kBlock, 0.0f, 1.0f));
  }
  load_fields(key_, keys, block.count, block.key_scales, block.key_zeros);
}

// Whether rows first .. first + count see all keys of a block, and nothing but their scales and
// zeros is to be done. Both ends of what is seen rise with the row.
bool AttentionRows::is_whole(const Rows& rows, int first, int count, const Block& block) const {
  const int64_t top = rows.first + first;
  return has_plain_scores() &&
         coded(rows.b, top, rows.hand).high >= block.at + block.count &&
         coded(rows.b, top + count - 1, rows.hand).low <= block.at &&
         has_zero_bias(rows, first, count, block);
}

// Whether the bias of a block is nothing but zeros, as it is in a decode step of a model with a
// mask that hides nothing. Zeros of all element types are zero bytes.
bool AttentionRows::has_zero_bias(const Rows& rows, int first, int count,
                                  const Block& block) const {
  if (call_.bias == nullptr) return true;
  const std::size_t size = element_size(call_.element);
  const int64_t loaded = call_.bias_stride[3] == 0 ? 1 : block.count;
  int64_t before = -1;
  for (int r = first; r < first + count; ++r) {
    const int64_t offset = bias_offset(rows, r, block);
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

// Adds the values of a block and asks memory for later ones.
void AttentionRows::add_values(const Rows& rows, const uint8_t* values, const Block& block,
                               float* scores, float* decoded, Later later) const {
  const int count = block.count;
  if (value_.parts() > 1) {
    value_.weight_scales(values, count, block.value_scales);
    if (has_zeros()) std::fill_n(block.value_zeros, kBlock, 0.0f);
  } else {
    load_fields(value_, values, count, block.value_scales, block.value_zeros);
  }
  if (value_.parts() > 1 || value_.has_zeros() || call_.offsets > 0) {
    std::fill_n(block.ones, kBlock, 1.0f);
  }
  if (!value_.is_integer()) {
    for (int r = 0; r < rows.count; ++r) softmax_block(rows, r, block, scores + r * kBlock);
    return value_.accumulate(values, count, scores, rows.count, decoded, rows.sums);
  }
  // Behind the last key: scores of -infinity, which scales of zero would make no numbers.
  std::fill_n(block.key_scales + count, kBlock - count, 1.0f);
  float* const numbers = decoded;
  float asked = 0.0f;
  for (int first = 0; first < rows.count; first += kSoftRows) {
    const int some = std::min(kSoftRows, rows.count - first);
    if (softens_whole() && is_whole(rows, first, some, block)) {
      const float share = std::max(asked, kSoftenShare);
      soften_whole(rows, first, some, block, values, scores, numbers,
                   value_.part_of(later.rows, later.count, asked, share));
      asked = share;
    } else {
      for (int r = first; r < first + some; ++r) {
        soften_and_quantise(rows, r, block, values, scores, numbers);
      }
    }
  }
  value_.accumulate_numbers(values, count, numbers, weight_scales(rows, block).pitch, rows.count,
                            rows.sums, value_.part_of(later.rows, later.count, asked, 1.0f));
}

void AttentionRows::soften_and_quantise(const Rows& rows, int r, const Block& block,
                                        const uint8_t* values, float* scores,
                                        float* numbers) const {
  softmax_block(rows, r, block, scores + r * kBlock);
  value_.quantise(values, block.count, scores + r * kBlock, weight_scales(rows, block),
                  numbers + r * kOperandFloats,
                  rows.sums + static_cast<std::size_t>(r) * sums_width());
}

// Of rows that see a whole block and need nothing but its scales and zeros.
void AttentionRows::soften_whole(const Rows& rows, int first, int count, const Block& block,
                                 const uint8_t* values, float* scores, float* numbers,
                                 PrefetchRange prefetch) const {
  float maxima[kSoftRows], exponentials[kSoftRows];
  std::copy_n(rows.max + first, count, maxima);
  for (int r = first; r < first + count; ++r) {
    std::fill_n(scores + r * kBlock + block.count, kBlock - block.count, kNoMaximum);
  }
  float zeros[kSoftRows] = {};
  if (has_zeros()) {
    CacheRows::ask(prefetch);
    for (int i = 0; i < count; ++i) {
      const int r = first + i;
      const float query_sum = has_shift() ? rows.shifts[r * shift_width()] : 0.0f;
      exponentials[i] = kernels_.integers->softmax_block_zeros(
          scores + r * kBlock, block.key_scales, block.key_zeros, query_sum, block.value_scales,
          block.value_zeros, maxima + i, numbers + r * kOperandFloats, zeros + i);
    }
  } else {
    kernels_.integers->softmax_block(scores + first * kBlock, count, block.key_scales,
                              weight_scales(rows, block), maxima, exponentials,
                              numbers + first * kOperandFloats, prefetch);
  }
  for (int i = 0; i < count; ++i) {
    const int r = first + i;
    if (std::isnan(exponentials[i])) {  // something is not finite
      soften_and_quantise(rows, r, block, values, scores, numbers);
      continue;
    }
    if (maxima[i] > rows.max[r]) {
      rescale(rows, r, std::exp(rows.max[r] - maxima[i]));
      rows.max[r] = maxima[i];
    }
    rows.weight[r] += exponentials[i];
    if (value_.has_zeros()) add_to_sums(rows, r, zeros[i]);
  }
}

void AttentionRows::add_to_sums(const Rows& rows, int r, float zeros) const {
  const std::size_t width = sums_width();
  float* const sums = rows.sums + static_cast<std::size_t>(r) * width;
  for (std::size_t j = 0; j < width; ++j) sums[j] += zeros;
}

// Zeros are loaded where one of the two caches has any.
void AttentionRows::load_fields(const CacheRows& cache, const uint8_t* at, int count, float* scales,
                                float* zeros) const {
  if (cache.has_zeros()) return cache.scales_and_zeros(at, count, scales, zeros);
  cache.scales(at, count, scales);
  if (has_zeros()) std::fill_n(zeros, kBlock, 0.0f);
}

// One step of the online softmax for one query row.
void AttentionRows::softmax_block(const Rows& rows, int r, const Block& block, float* scores) const {
  const Range range = coded(rows.b, rows.first + r, rows.hand);
  const int low = static_cast<int>(std::clamp<int64_t>(range.low - block.at, 0, block.count));
  const int high = static_cast<int>(std::clamp<int64_t>(range.high - block.at, 0, block.count));
  const float* const shift = has_shift() ? load_shift(rows, r, block) : nullptr;
  const float* const bias = call_.bias == nullptr ? nullptr : load_bias(rows, r, block);
  const float max = kernels_.finish_scores(scores, block.key_scales, shift, bias,
                                           hiding_bias(call_.element), call_.softcap, block.count,
                                           low, high);
  if (max > rows.max[r]) {
    rescale(rows, r, std::exp(rows.max[r] - max));
    rows.max[r] = max;
  }
  // While every key so far is hidden, any finite maximum gives weights of zero.
  weigh(rows, r, block, rows.max[r] == kNoMaximum ? 0.0f : rows.max[r], scores);
}

void AttentionRows::rescale(const Rows& rows, int r, float factor) const {
  rows.weight[r] *= factor;
  scale_sums(rows, r, factor);
}

void AttentionRows::scale_sums(const Rows& rows, int r, float factor) const {
  kernels_.scale(rows.sums + static_cast<std::size_t>(r) * sums_width(), factor,
                 static_cast<int>(sums_width()));
  kernels_.scale(rows.buckets + static_cast<std::size_t>(r) * bucket_width(), factor,
                 static_cast<int>(bucket_width()));
}

// From scores to what the numbers of the values are multiplied with; adds everything else that the
// weights do.
void AttentionRows::weigh(const Rows& rows, int r, const Block& block, float max,
                          float* scores) const {
  const int64_t last = call_.offsets - 1;
  float* const buckets = rows.buckets + static_cast<std::size_t>(r) * bucket_width();
  const bool is_late = block.at >= last;  // one bucket for all
  if (is_late && !value_.has_zeros()) {
    const float sum = kernels_.weigh(scores, float_scales(block), block.count, max);
    rows.weight[r] += sum;
    if (last >= 0) buckets[last] += sum;
    return;
  }
  const float sum = kernels_.weigh(scores, block.ones, block.count, max);
  rows.weight[r] += sum;
  if (is_late && last >= 0) buckets[last] += sum;
  for (int t = 0; !is_late && t < block.count; ++t) {
    buckets[offset_of(block.at + t)] += scores[t];
  }
  // What is hidden contributes nothing, even where its fields are no numbers.
  const float zeros = kernels_.apply_fields(scores, float_scales(block),
                                            value_.has_zeros() ? block.value_zeros : nullptr,
                                            block.count, scores);
  if (value_.has_zeros()) add_to_sums(rows, r, zeros);
}

// What is added to the scaled scores: zero * sum(q), <q, offset>.
const float* AttentionRows::load_shift(const Rows& rows, int r, const Block& block) const {
  const float* const shifts = rows.shifts + static_cast<std::size_t>(r) * shift_width();
  if (call_.offsets == 0) {
    for (int t = 0; t < kBlock; ++t) block.shift[t] = block.key_zeros[t] * shifts[0];
    return block.shift;
  }
  for (int t = 0; t < kBlock; ++t) block.shift[t] = shifts[1 + offset_of(block.at + t)];
  if (key_.has_zeros()) {
    for (int t = 0; t < kBlock; ++t) block.shift[t] += block.key_zeros[t] * shifts[0];
  }
  return block.shift;
}

int64_t AttentionRows::bias_offset(const Rows& rows, int r, const Block& block) const {
  const int64_t row = rows.first + r;
  const int64_t* const stride = call_.bias_stride;
  return rows.b * stride[0] + query_head(rows.n, row) * stride[1] + token(row) * stride[2] +
         block.at * stride[3];
}

const float* AttentionRows::load_bias(const Rows& rows, int r, const Block& block) const {
  const int64_t offset = bias_offset(rows, r, block);
  const int loaded = call_.bias_stride[3] == 0 ? 1 : block.count;
  load_floats(kernels_, call_.element, call_.bias, static_cast<std::size_t>(offset), block.bias,
              static_cast<std::size_t>(loaded));
  if (loaded == 1) std::fill_n(block.bias, kBlock, block.bias[0]);
  return block.bias;
}

void AttentionRows::prepare(const int64_t* flat_rows, int count, float* scratch,
                            float* const* query, float* const* shifts,
                            float* const* exact) const {
  const int size = call_.head_size, width = key_.coordinates();
  float* const natural = scratch;
  float* const rotated = scratch + static_cast<std::size_t>(count) * size;
  for (int r = 0; r < count; ++r) {
    load_floats(kernels_, call_.element, call_.query,
                static_cast<std::size_t>(vector_of(flat_rows[r])) * size, natural + r * size,
                static_cast<std::size_t>(size));
  }
  kernels_.scale(natural, call_.scale, count * size);
  if (spec::is_rotated(call_.key.codec.kind)) {
    int64_t heads[kDecodeRows];
    for (int r = 0; r < count; ++r) heads[r] = head_of(flat_rows[r]);
    rotate_heads(kernels_, call_.key_rotation, heads, natural, rotated, count, size, width);
  } else {
    std::copy_n(natural, count * size, rotated);
  }
  for (int r = 0; r < count; ++r) {
    key_.prepare_query(rotated + r * width, query[r]);
    window_.prepare_query(natural + r * size, exact[r]);
    if (!has_shift()) continue;
    const float* const q = natural + r * size;
    double sum = 0;
    for (int j = 0; j < size; ++j) sum += q[j];
    shifts[r][0] = static_cast<float>(sum);
    for (int64_t p = 0; p < call_.offsets; ++p) {
      const float* const offset =
          call_.key_offset + (p * call_.heads + head_of(flat_rows[r])) * size;
      double dot = 0;
      for (int j = 0; j < size; ++j) dot += static_cast<double>(q[j]) * offset[j];
      shifts[r][1 + p] = static_cast<float>(dot);
    }
  }
}

void AttentionRows::finish(const int64_t* flat_rows, int count, const float* const* sums,
                           const float* const* buckets, const float* const* exact,
                           const float* weight, float* scratch) const {
  const int size = call_.head_size, width = value_.coordinates();
  float* const natural = scratch;
  float* out = scratch + static_cast<std::size_t>(count) * width;
  for (int r = 0; r < count; ++r) {
    float* const x = natural + r * width;
    value_.natural_sums(sums[r], x);
    if (weight[r] == 0.0f) {  // every key is hidden, and there is no sink
      std::fill_n(x, width, 0.0f);
    } else {
      kernels_.divide(x, weight[r], x, width);
    }
  }
  if (spec::is_rotated(call_.value.codec.kind)) {
    int64_t heads[kDecodeRows];
    for (int r = 0; r < count; ++r) heads[r] = head_of(flat_rows[r]);
    unrotate_heads(kernels_, call_.value_rotation, heads, natural, out, count, size, width);
  } else {
    out = natural;
  }
  for (int r = 0; r < count; ++r) {
    float* const x = out + r * size;
    for (int64_t p = 0; weight[r] != 0.0f && p < call_.offsets; ++p) {
      const float share = buckets[r][p] / weight[r];
      if (share == 0.0f) continue;
      const float* const offset =
          call_.value_offset + (p * call_.heads + head_of(flat_rows[r])) * size;
      for (int j = 0; j < size; ++j) x[j] += share * offset[j];
    }
    if (window_.is_on() && weight[r] != 0.0f) window_.add_share(exact[r], weight[r], x);
    store_floats(kernels_, call_.element, x, call_.output,
                 static_cast<std::size_t>(vector_of(flat_rows[r])) * size,
                 static_cast<std::size_t>(size));
  }
}

}  // namespace tq
