// Rows of prod, of two parts with a scale each: the codes of an index, and the signs of what the index
// misses. A vector of coordinates is that of the first part, then that of the second. Numbers come with
// their scales.

#include <algorithm>
#include <optional>

#include "core/coded_part.h"
#include "core/readers.h"
#include "core/row_format.h"

namespace tq {
namespace {

// sqrt(pi / 2)
constexpr double kRootOfHalfPi = 1.2533141373155002512;

// Query rows that are multiplied in registers at every level.
constexpr int kMaxFused = 16;

constexpr float kSigns[kTable] = {-1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1,
                                  -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1};

CodedPart signs_of(const Kernels& kernels, const CacheView& cache, int head_size, bool is_integer) {
  std::optional<IntegerTable> integers;
  if (is_integer) integers = integers_of(kSigns, 1);
  return {kernels, row_format(1, head_size, kernels.lanes, cache.stride, cache.end), kSigns,
          integers};
}

// The share of the first part of what is prefetched, and that of the second.
PrefetchRange begin_of(PrefetchRange range) { return {range.begin, range.bytes / 2}; }
PrefetchRange rest_of(PrefetchRange range) {
  return {range.begin + range.bytes / 2, range.bytes - range.bytes / 2};
}

class TwoPartReader final : public RowReader {
 public:
  TwoPartReader(const Kernels& kernels, const CacheView& cache, int head_size,
                const CodedPart& first, const CodedPart& second)
      : RowReader(
            kernels, cache, head_size,
            {first.query_width() + second.query_width(), first.sums_width() + second.sums_width(),
             first.padded() + second.padded(), kMaxParts, first.is_integer(), false, true}),
        // The last plane.
        second_at_(spec::plane_offset(cache.codec, spec::planes(cache.codec).count - 1, head_size)),
        first_(first),
        second_(second) {}

  void prepare_query(const float* natural, float* prepared) const override {
    first_.prepare_query(natural, prepared);
    second_.prepare_query(natural + head_size(), prepared + first_.query_width());
  }

  void natural_sums(const float* sums, float* natural) const override {
    first_.natural_sums(sums, natural);
    second_.natural_sums(sums + first_.sums_width(), natural + head_size());
  }

  int largest(int part) const override { return part == 0 ? first_.largest() : second_.largest(); }

  void weight_scales(const uint8_t* rows, int count, float* out) const override {
    load_scales(rows, count, out, out + kBlock);
  }

  void quantise(const uint8_t* rows, int count, const float* weights, const PartScales& scales,
                float* operands, float* sum) const override {
    alignas(64) float scaled[kBlock];
    kernels().apply_fields(weights, scales.scales, nullptr, count, scaled);
    first_.quantise(rows, count, scaled, operands, sum);
    kernels().apply_fields(weights, scales.scales + kBlock, nullptr, count, scaled);
    second_.quantise(second(rows), count, scaled, operands + scales.pitch,
                     sum + first_.sums_width());
  }

  void accumulate_operands(const uint8_t* rows, int count, const float* operands,
                           std::ptrdiff_t pitch, int queries, float* sums,
                           PrefetchRange prefetch) const override {
    first_.accumulate_operands(rows, count, operands, queries, sums, sums_width(),
                               begin_of(prefetch));
    second_.accumulate_operands(second(rows), count, operands + pitch, queries,
                                sums + first_.sums_width(), sums_width(), rest_of(prefetch));
  }

 private:
  void load_scales(const uint8_t* rows, int count, float* first, float* second) const {
    const uint8_t* at = rows + fields();
    kernels().load_fields(at, stride(), count, first);
    kernels().load_fields(at + 2, stride(), count, second);
    kernels().scale(second, static_cast<float>(kRootOfHalfPi / head_size()), kBlock);
  }

  bool is_fused(int queries) const override {
    // Integers are never decoded: their queries lie in another order.
    return first_.is_integer() || queries <= kMaxFused;
  }

  // Scales of both parts; per query a block of scores or weights, and a row of one part or the operands
  // of both.
  std::size_t fused_work_size(int queries) const override {
    const int widest = std::max({first_.padded(), second_.padded(), kMaxParts * kOperandFloats});
    return 2 * kBlock + static_cast<std::size_t>(queries) * (kBlock + widest);
  }

  // `query` points at the part in the first row. Kernels of floats want its rows one after the other.
  void score_part(const CodedPart& part, const uint8_t* rows, int count, const float* query,
                  int queries, float* work, float* scores, PrefetchRange prefetch) const {
    if (part.is_integer()) {
      return part.score(rows, count, query, query_width(), queries, scores, prefetch);
    }
    const int width = part.query_width();
    for (int r = 0; r < queries; ++r) {
      std::copy_n(query + r * query_width(), width, work + r * width);
    }
    part.score(rows, count, work, width, queries, scores, prefetch);
  }

  void score_fused(const uint8_t* rows, int count, const float* query, int queries, float* work,
                   float* scores, PrefetchRange prefetch) const override {
    float* const first_scales = work;
    float* const second_scales = first_scales + kBlock;
    float* const of_second = second_scales + kBlock;
    float* const rest = of_second + static_cast<std::size_t>(queries) * kBlock;
    score_part(first_, rows, count, query, queries, rest, scores, begin_of(prefetch));
    score_part(second_, second(rows), count, query + first_.query_width(), queries, rest, of_second,
               rest_of(prefetch));
    load_scales(rows, count, first_scales, second_scales);
    for (int r = 0; r < queries; ++r) {
      kernels().add_scaled(scores + r * kBlock, first_scales, of_second + r * kBlock, second_scales,
                           count);
    }
  }

  // `sums` points at the part in the first row.
  void accumulate_part(const CodedPart& part, const uint8_t* rows, int count, const float* weights,
                       int queries, float* work, float* sums) const {
    const int width = part.sums_width();
    for (int r = 0; r < queries; ++r) std::copy_n(sums + r * sums_width(), width, work + r * width);
    part.accumulate(rows, count, weights, queries, work);
    for (int r = 0; r < queries; ++r) std::copy_n(work + r * width, width, sums + r * sums_width());
  }

  void accumulate_fused(const uint8_t* rows, int count, const float* weights, int queries,
                        float* work, float* sums) const override {
    float* const first_scales = work;
    float* const second_scales = first_scales + kBlock;
    float* const scaled = second_scales + kBlock;
    float* const rest = scaled + static_cast<std::size_t>(queries) * kBlock;
    load_scales(rows, count, first_scales, second_scales);
    const auto scale_weights = [&](const float* scales) {
      for (int r = 0; r < queries; ++r) {
        kernels().apply_fields(weights + r * kBlock, scales, nullptr, count, scaled + r * kBlock);
      }
    };
    scale_weights(first_scales);
    accumulate_part(first_, rows, count, scaled, queries, rest, sums);
    scale_weights(second_scales);
    accumulate_part(second_, second(rows), count, scaled, queries, rest,
                    sums + first_.sums_width());
  }

  void decode_rows(const uint8_t* rows, int count, float* values) const override {
    alignas(64) float first_scales[kBlock], second_scales[kBlock];
    load_scales(rows, count, first_scales, second_scales);
    for (int t = 0; t < count; ++t, rows += stride(), values += padded()) {
      float* const second_values = values + first_.padded();
      first_.decode_rows(rows, 1, values);
      kernels().scale(values, first_scales[t], first_.padded());
      second_.decode_rows(second(rows), 1, second_values);
      kernels().scale(second_values, second_scales[t], second_.padded());
    }
  }

  const uint8_t* second(const uint8_t* rows) const { return rows + second_at_; }

  const int second_at_;  // first byte of the second part
  const CodedPart first_, second_;
};

}  // namespace

std::unique_ptr<const RowReader> make_two_part_reader(const Kernels& kernels,
                                                      const CacheView& cache, int head_size) {
  // Integers are taken of both parts or of none.
  const CodedPart first = first_part(kernels, cache, head_size, kernels.integers != nullptr);
  return std::make_unique<TwoPartReader>(kernels, cache, head_size, first,
                                         signs_of(kernels, cache, head_size, first.is_integer()));
}

}  // namespace tq
