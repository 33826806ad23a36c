// Blocks of rows of two parts; the contract is in parted_rows.h.
#include "core/parted_rows.h"

#include <algorithm>
#include <optional>

#include "core/row_format.h"
#include "core/stored_scale.h"

namespace tq {
namespace {

// sqrt(pi / 2)
constexpr double kRootOfHalfPi = 1.2533141373155002512;

// Query rows that are multiplied in registers at every level.
constexpr int kMaxFused = 16;

constexpr float kSigns[kTable] = {-1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1,
                                  -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1};
constexpr IntegerTable kIntegerSigns = {{-1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1},
                                        1.0f};

// The codebook of the second class; returns its levels.
int fill_second_table(const CacheView& cache, float* table) {
  const int levels = 1 << spec::index_bits(cache.codec, 1);
  fill_table(cache.centroids + (1 << spec::index_bits(cache.codec)), levels, table);
  return levels;
}

// The signs of prod, or the second class of coordinates.
CodedPart second_part(const Kernels& kernels, const CacheView& cache, int head_size,
                      bool is_integer) {
  const spec::Codec codec = cache.codec;
  std::optional<IntegerTable> integers;
  if (spec::has_sketch(codec.kind)) {
    if (is_integer) integers = kIntegerSigns;
    return {kernels, row_format(1, head_size, kernels.lanes, cache.stride, cache.end), kSigns,
            integers};
  }
  float table[kTable];
  const int levels = fill_second_table(cache, table);
  if (is_integer) integers = integers_of(table, levels, kLargestInteger);
  const RowFormat format =
      row_format(spec::index_bits(codec, 1), spec::class_size(codec, 1, head_size), kernels.lanes,
                 cache.stride, cache.end);
  return {kernels, format, table, integers};
}

}  // namespace

bool PartedRows::may_round(const CacheView& cache) {
  if (!spec::is_split(cache.codec.kind)) return true;
  float table[kTable];
  const int levels = fill_second_table(cache, table);
  return integers_of(table, levels, kLargestInteger).has_value();
}

PartedRows::PartedRows(const Kernels& kernels, const CacheView& cache, int head_size,
                       const CodedPart& first)
    : kernels_(kernels),
      codec_(cache.codec),
      head_size_(head_size),
      stride_(cache.stride),
      fields_(spec::code_bytes(cache.codec, head_size)),
      first_size_(spec::class_size(cache.codec, 0, head_size)),
      // The last plane.
      second_at_(spec::plane_offset(cache.codec, spec::planes(cache.codec).count - 1, head_size)),
      first_(first),
      second_(second_part(kernels, cache, head_size, first.is_integer())) {}

void PartedRows::prepare_query(const float* natural, float* prepared) const {
  first_.prepare_query(natural, prepared);
  second_.prepare_query(natural + first_size_, prepared + first_.query_width());
}

void PartedRows::natural_sums(const float* sums, float* natural) const {
  first_.natural_sums(sums, natural);
  second_.natural_sums(sums + first_.sums_width(), natural + first_size_);
}

void PartedRows::load_scales(const uint8_t* rows, int count, float* first, float* second) const {
  const uint8_t* at = rows + fields_;
  if (spec::has_sketch(codec_.kind)) {
    kernels_.load_fields(at, stride_, count, first);
    kernels_.load_fields(at + 2, stride_, count, second);
    return kernels_.scale(second, static_cast<float>(kRootOfHalfPi / head_size_), kBlock);
  }
  kernels_.load_scale_pairs(at, stride_, count, scales_of_bytes(), first, second);
}

bool PartedRows::is_fused(int queries) const {
  // Integers are never decoded: their queries lie in another order.
  return first_.is_integer() || queries <= kMaxFused;
}

// Scales of both parts; per query a block of scores or weights, and a row of one part or the numbers
// of both.
std::size_t PartedRows::work_size(int queries) const {
  const int widest = std::max({first_.padded(), second_.padded(), kMaxParts * kOperandFloats});
  return 2 * kBlock + static_cast<std::size_t>(queries) * (kBlock + widest);
}

// `query` points at the part in the first row. Kernels of floats want its rows one after the other.
void PartedRows::score_part(const CodedPart& part, const uint8_t* rows, int count,
                            const float* query, int queries, float* work, float* scores,
                            PrefetchRange prefetch) const {
  if (part.is_integer()) {
    return part.score(rows, count, query, query_width(), queries, scores, prefetch);
  }
  const int width = part.query_width();
  for (int r = 0; r < queries; ++r) {
    std::copy_n(query + r * query_width(), width, work + r * width);
  }
  part.score(rows, count, work, width, queries, scores, prefetch);
}

void PartedRows::score(const uint8_t* rows, int count, const float* query, int queries, float* work,
                       float* scores, PrefetchRange prefetch) const {
  float* const first_scales = work;
  float* const second_scales = first_scales + kBlock;
  float* const of_second = second_scales + kBlock;
  float* const rest = of_second + static_cast<std::size_t>(queries) * kBlock;
  score_part(first_, rows, count, query, queries, rest, scores, begin_of(prefetch));
  score_part(second_, second(rows), count, query + first_.query_width(), queries, rest, of_second,
             rest_of(prefetch));
  load_scales(rows, count, first_scales, second_scales);
  for (int r = 0; r < queries; ++r) {
    kernels_.add_scaled(scores + r * kBlock, first_scales, of_second + r * kBlock, second_scales,
                        count);
  }
}

// `sums` points at the part in the first row.
void PartedRows::accumulate_part(const CodedPart& part, const uint8_t* rows, int count,
                                 const float* weights, int queries, float* work,
                                 float* sums) const {
  const int width = part.sums_width();
  for (int r = 0; r < queries; ++r) std::copy_n(sums + r * sums_width(), width, work + r * width);
  part.accumulate(rows, count, weights, queries, work);
  for (int r = 0; r < queries; ++r) std::copy_n(work + r * width, width, sums + r * sums_width());
}

void PartedRows::accumulate(const uint8_t* rows, int count, const float* weights, int queries,
                            float* work, float* sums) const {
  float* const first_scales = work;
  float* const second_scales = first_scales + kBlock;
  float* const scaled = second_scales + kBlock;
  float* const rest = scaled + static_cast<std::size_t>(queries) * kBlock;
  load_scales(rows, count, first_scales, second_scales);
  const auto scale_weights = [&](const float* scales) {
    for (int r = 0; r < queries; ++r) {
      kernels_.apply_fields(weights + r * kBlock, scales, nullptr, count, scaled + r * kBlock);
    }
  };
  scale_weights(first_scales);
  accumulate_part(first_, rows, count, scaled, queries, rest, sums);
  scale_weights(second_scales);
  accumulate_part(second_, second(rows), count, scaled, queries, rest, sums + first_.sums_width());
}

void PartedRows::quantise(const uint8_t* rows, int count, const float* weights,
                          const PartScales& scales, float* numbers, float* sum) const {
  alignas(64) float scaled[kBlock];
  kernels_.apply_fields(weights, scales.scales, nullptr, count, scaled);
  first_.quantise(rows, count, scaled, numbers, sum);
  kernels_.apply_fields(weights, scales.scales + kBlock, nullptr, count, scaled);
  second_.quantise(second(rows), count, scaled, numbers + scales.pitch,
                   sum + first_.sums_width());
}

void PartedRows::accumulate_numbers(const uint8_t* rows, int count, const float* numbers,
                                    std::ptrdiff_t pitch, int queries, float* sums,
                                    PrefetchRange prefetch) const {
  first_.accumulate_numbers(rows, count, numbers, queries, sums, sums_width(), begin_of(prefetch));
  second_.accumulate_numbers(second(rows), count, numbers + pitch, queries,
                             sums + first_.sums_width(), sums_width(), rest_of(prefetch));
}

void PartedRows::decode(const uint8_t* rows, int count, float* values) const {
  alignas(64) float first_scales[kBlock], second_scales[kBlock];
  load_scales(rows, count, first_scales, second_scales);
  for (int t = 0; t < count; ++t, rows += stride_, values += padded()) {
    float* const second_values = values + first_.padded();
    first_.decode_rows(rows, 1, values);
    kernels_.scale(values, first_scales[t], first_.padded());
    second_.decode_rows(second(rows), 1, second_values);
    kernels_.scale(second_values, second_scales[t], second_.padded());
  }
}

}  // namespace tq
