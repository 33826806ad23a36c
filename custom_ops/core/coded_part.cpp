// Products of one part of a row; the contract is in coded_part.h.
#include "core/coded_part.h"

#include <algorithm>
#include <cmath>

#include "core/row_format.h"

namespace tq {
namespace {

// A byte is 8: one slot, the natural order.
int code_bits(spec::Codec codec) {
  if (spec::planes(codec).plane[0].width == 8) return 8;
  return spec::is_rotated(codec.kind) ? spec::index_bits(codec) : codec.bits;
}

}  // namespace

CodedPart::CodedPart(const Kernels& kernels, const RowFormat& format, const float* table,
                     const std::optional<IntegerTable>& integers)
    : kernels_(kernels),
      format_(format),
      integers_(integers),
      query_width_(is_integer() ? kernels.integers->query_floats(format) : format.padded),
      sums_width_(is_integer() ? kernels.integers->sums_floats(format) : format.padded) {
  std::copy_n(table, kTable, table_);
}

void CodedPart::prepare_query(const float* natural, float* prepared) const {
  if (is_integer()) return kernels_.integers->prepare_query(format_, *integers_, natural, prepared);
  to_slot_order(format_, natural, prepared);
}

void CodedPart::natural_sums(const float* sums, float* natural) const {
  if (is_integer()) return kernels_.integers->natural_sums(format_, sums, natural);
  to_natural_order(format_, sums, natural);
}

void CodedPart::score(const uint8_t* rows, int count, const float* query, int pitch, int queries,
                      float* scores, PrefetchRange prefetch) const {
  if (is_integer()) {
    return kernels_.integers->score_rows(format_, rows, count, *integers_, query, pitch, queries,
                                         scores, prefetch);
  }
  kernels_.score_rows(format_, rows, count, table_, query, queries, scores);
}

void CodedPart::accumulate(const uint8_t* rows, int count, const float* weights, int queries,
                           float* sums) const {
  kernels_.accumulate_rows(format_, rows, count, table_, weights, queries, sums);
}

void CodedPart::quantise(const uint8_t* rows, int count, const float* weights, float* operands,
                         float* sum) const {
  if (!kernels_.integers->quantise_weights(weights, count, integers_->largest, operands)) {
    accumulate_nonfinite(rows, count, weights, sum);
  }
}

void CodedPart::accumulate_operands(const uint8_t* rows, int count, const float* operands,
                                    int queries, float* sums, int pitch,
                                    PrefetchRange prefetch) const {
  kernels_.integers->accumulate_rows(format_, rows, count, *integers_, operands, queries, sums,
                                     pitch, prefetch);
}

// One query row whose weights are not all finite; a weight of zero adds nothing.
void CodedPart::accumulate_nonfinite(const uint8_t* rows, int count, const float* weights,
                                     float* sum) const {
  alignas(64) float value[kMaxIntegerWidth], natural[kMaxIntegerWidth], ordered[kMaxIntegerWidth];
  for (int t = 0; t < count; ++t, rows += format_.stride) {
    if (weights[t] == 0.0f) continue;
    if (std::isnan(weights[t])) {
      // Times any centroid it is NaN. Where one is, mostly all are: a spoilt query is no slow one.
      std::fill_n(sum, sums_width_, weights[t]);
      return;
    }
    decode_rows(rows, 1, value);
    to_natural_order(format_, value, natural);
    kernels_.integers->ordered_sums(format_, natural, ordered);
    for (int j = 0; j < sums_width_; ++j) sum[j] += weights[t] * ordered[j];
  }
}

void CodedPart::decode_rows(const uint8_t* rows, int count, float* values) const {
  kernels_.decode_rows(format_, rows, count, table_, values);
}

void CodedPart::decode_columns(const uint8_t* rows, int count, float* keys) const {
  kernels_.decode_columns(format_, rows, count, table_, keys);
}

// What the codes stand for: the codebook's centroids; of equal steps, whose numbers are left to scale
// and zero, codes from the middle of the range, so that little cancels between these two.
//
// Scores of keys with zeros bear integers, too. Let a query q be rounded to n steps of its largest
// coordinate, each off by a deviation of max |q| / (n sqrt(12)): that moves a score by at most
//   max |q| / (n sqrt(12)) * scale * sqrt(D) (2^bits - 1) / 2,
// where rounding the keys to their codes has moved it by |q| * scale / sqrt(12). With max |q| < |q|
// it is less than sqrt(D) (2^bits - 1) / (2 n) of that, however large the zeros are.
CodedPart first_part(const Kernels& kernels, const CacheView& cache, int head_size,
                     bool may_round) {
  const spec::Codec codec = cache.codec;
  const RowFormat format =
      row_format(code_bits(codec), head_size, kernels.lanes, cache.stride, cache.end);
  float table[kTable];
  std::optional<IntegerTable> integers;
  if (spec::is_rotated(codec.kind)) {
    const int levels = spec::levels(codec);
    fill_code_table(cache, table);
    if (may_round && spec::is_signed(codec.kind)) {
      integers = integers_of(table, spec::sign_bit(codec));
    } else if (may_round) {
      integers = least_integers(table, levels);
      if (!integers.has_value() && levels > kIntegerLevels) {
        integers = nearest_integers(table, levels);
      }
    }
  } else {
    const int top = (1 << codec.bits) - 1;
    for (int i = 0; i < kTable; ++i) {
      table[i] = static_cast<float>(i % (top + 1)) - 0.5f * static_cast<float>(top);
    }
    if (may_round) integers = integers_of(table, top);
  }
  return {kernels, format, table, integers};
}

CodedPart CodedPart::negative() const {
  CodedPart part = *this;
  for (float& number : part.table_) number = -number;
  if (part.integers_.has_value()) part.integers_->unit = -part.integers_->unit;
  return part;
}

}  // namespace tq
