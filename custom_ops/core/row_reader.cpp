// What all readers have in common; the contract is in row_reader.h.
#include "core/row_reader.h"

#include <algorithm>

#include "core/half.h"
#include "core/readers.h"

namespace tq {

RowReader::RowReader(const Kernels& kernels, const CacheView& cache, int head_size,
                     const Layout& layout)
    : kernels_(kernels),
      codec_(cache.codec),
      head_size_(head_size),
      cache_(cache),
      stride_(cache.stride),
      fields_(spec::code_bytes(cache.codec, head_size)),
      layout_(layout) {}

void RowReader::scales(const uint8_t*, int, float* out) const { std::fill_n(out, kBlock, 1.0f); }

void RowReader::scales_and_zeros(const uint8_t*, int, float*, float*) const {}

int RowReader::largest(int) const { return 0; }

void RowReader::weight_scales(const uint8_t* rows, int count, float* out) const {
  scales(rows, count, out);
}

void RowReader::quantise(const uint8_t*, int, const float*, const PartScales&, float*,
                         float*) const {}

void RowReader::accumulate_operands(const uint8_t*, int, const float*, std::ptrdiff_t, int, float*,
                                    PrefetchRange) const {}

std::size_t RowReader::work_size(int queries) const {
  if (is_fused(queries)) return fused_work_size(queries);
  const std::size_t block = static_cast<std::size_t>(kBlock) * padded();
  return layout_.is_scaled ? 2 * block : block;
}

void RowReader::score(const uint8_t* rows, int count, const float* query, int queries, float* work,
                      float* scores, PrefetchRange prefetch) const {
  if (is_fused(queries)) {
    return score_fused(rows, count, query, queries, work, scores, prefetch);
  }
  const int width = padded(), lanes = kernels_.lanes;
  decode_columns(rows, count, work);
  kernels_.multiply(query, width, work, kBlock, scores, kBlock, queries,
                    (count + lanes - 1) / lanes * lanes, width, false);
}

void RowReader::accumulate(const uint8_t* rows, int count, const float* weights, int queries,
                           float* work, float* sums) const {
  if (is_fused(queries)) return accumulate_fused(rows, count, weights, queries, work, sums);
  const int width = padded();
  decode_rows(rows, count, work);
  if (layout_.is_scaled) add_nonfinite_rows(weights, queries, work, count, sums);
  kernels_.multiply(weights, kBlock, work, width, sums, width, queries, width, count, true);
}

void RowReader::decode_columns(const uint8_t* rows, int count, float* keys) const {
  float* const values = keys + static_cast<std::size_t>(kBlock) * padded();
  decode_rows(rows, count, values);
  kernels_.transpose_block(values, count, padded(), keys);
}

// In a product of matrices, zero times infinity would spoil queries that do not see a row. Rows
// that are not finite are added here and left out there.
void RowReader::add_nonfinite_rows(const float* weights, int queries, float* values, int count,
                                   float* sums) const {
  const int width = padded();
  for (int t = 0; t < count; ++t) {
    float* const value = values + static_cast<std::ptrdiff_t>(t) * width;
    if (is_finite(value, width)) continue;
    for (int r = 0; r < queries; ++r) {
      const float weight = weights[r * kBlock + t];
      if (weight == 0.0f) continue;
      float* const sum = sums + static_cast<std::ptrdiff_t>(r) * width;
      for (int j = 0; j < width; ++j) sum[j] += weight * value[j];
    }
    std::fill_n(value, width, 0.0f);
  }
}

std::unique_ptr<const RowReader> make_row_reader(const Kernels& kernels, const CacheView& cache,
                                                 Element element, int head_size) {
  const spec::Kind kind = cache.codec.kind;
  if (spec::has_sketch(kind)) return make_two_part_reader(kernels, cache, head_size);
  if (spec::is_rotated(kind) || spec::has_zero(kind)) {
    return make_coded_reader(kernels, cache, head_size);
  }
  return make_byte_reader(kernels, cache, element, head_size);
}

}  // namespace tq
