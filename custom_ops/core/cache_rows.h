// The rows of one cache, as attention reads them: queries against keys, weights against values.
//
// Two kinds of codecs. Coded ones (lloyd_max, uniform, u8): products are taken with the centroids
// of the codes, in registers for few queries or decoded to memory for many, and a row's scale, for
// uniform also its zero, is left to the caller. The others (raw, fp8_e4m3, q8_0; prod and split kinds,
// whose rows have two parts): coordinates with everything that their fields say, in registers or
// decoded to memory likewise; the scales are ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "core/attention.h"
#include "core/coded_part.h"
#include "core/element.h"
#include "core/kernels.h"
#include "core/parted_rows.h"

namespace tq {

class CacheRows {
 public:
  // Products are taken with integers where the kernels have these, see IntegerKernels.
  CacheRows(const Kernels& kernels, const CacheView& cache, Element element, int head_size);

  int coordinates() const { return spec::coordinates(codec_, head_size_); }

  // Queries and sums lie as the kernels want them, see CodedPart.
  int query_width() const { return parts_ ? parts_->query_width() : code_.query_width(); }
  int sums_width() const { return parts_ ? parts_->sums_width() : code_.sums_width(); }
  void prepare_query(const float* natural, float* prepared) const;
  void natural_sums(const float* sums, float* natural) const;

  // Row `index` of the tensor.
  const uint8_t* row(int64_t index) const { return rows_ + index * stride_; }
  // From share `from` to share `to` of rows; nothing of rows that are null.
  PrefetchRange part_of(const uint8_t* rows, int count, float from, float to) const {
    if (rows == nullptr) return {};
    const float bytes = static_cast<float>(count) * static_cast<float>(stride_);
    const std::ptrdiff_t first = static_cast<std::ptrdiff_t>(from * bytes);
    return {rows + first, static_cast<std::ptrdiff_t>(to * bytes) - first};
  }
  const uint8_t* behind(const uint8_t* rows, int count) const {
    return rows + static_cast<std::ptrdiff_t>(count) * stride_;
  }
  // Asks memory for what will be read soon.
  static void ask(PrefetchRange prefetch);

  // A coordinate is scale * number + zero; blocks of up to kBlock rows.
  bool has_zeros() const { return spec::has_zero(codec_.kind); }
  void scales(const uint8_t* rows, int count, float* out) const;
  void scales_and_zeros(const uint8_t* rows, int count, float* scales, float* zeros) const;

  // Floats of `work` that the next two want for so many queries.
  std::size_t work_size(int queries) const;

  // scores[r][t] = <query[r], numbers of row t>. Integer products ask for `prefetch`.
  void score(const uint8_t* rows, int count, const float* query, int queries, float* work,
             float* scores, PrefetchRange prefetch) const;

  // sums[r] += sum over t of weights[r][t] * numbers of row t. A weight of zero adds nothing. Not where
  // is_integer().
  void accumulate(const uint8_t* rows, int count, const float* weights, int queries, float* work,
                  float* sums) const;

  // Where products are taken with integers, weights are rounded first, by what the scales of the parts
  // of their rows make of them: weight_scales has kBlock of each part. A row of weights may be
  // prepared for itself, of one part with its scales in it, of several without; its numbers have
  // kOperandFloats floats of each part, `pitch` floats apart, and what is not finite goes into its sum
  // at once.
  bool is_integer() const { return code_.is_integer(); }
  int parts() const { return parts_ ? kMaxParts : 1; }
  void weight_scales(const uint8_t* rows, int count, float* out) const;
  void quantise(const uint8_t* rows, int count, const float* weights, const PartScales& scales,
                float* numbers, float* sum) const;
  void accumulate_numbers(const uint8_t* rows, int count, const float* numbers,
                          std::ptrdiff_t pitch, int queries, float* sums, PrefetchRange prefetch) const;

 private:
  bool is_coded() const;
  bool is_fused(int queries) const;
  int padded() const { return parts_ ? parts_->padded() : code_.padded(); }
  void decode(const uint8_t* rows, int count, float* values) const;
  void decode_row(const uint8_t* row, float* value) const;
  void add_nonfinite_rows(const float* weights, int queries, float* values, int count,
                        float* sums) const;

  const Kernels& kernels_;
  const spec::Codec codec_;
  const Element element_;  // of raw rows
  const int head_size_;
  const uint8_t* const rows_;
  const int stride_;
  const int fields_;              // first byte of the fields
  const ByteFormat bytes_;        // of raw, fp8_e4m3 and q8_0
  const CodedPart code_;          // of coded rows; of others only the order of queries and sums
  std::optional<PartedRows> parts_;  // of kinds with two parts, which have an order of their own
};

}  // namespace tq
