// The rows of one cache, as attention reads them: queries against keys, weights against values.
//
// Two kinds of codecs. Coded ones (lloyd_max, uniform, u8): products are taken with the centroids
// of the codes, in registers for few queries or decoded to memory for many, and a row's scale, for
// uniform also its zero, is left to the caller. Decoded ones (raw, fp8_e4m3, q8_0, prod): blocks
// become floats in memory, with everything that their fields say; the scales are ones.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/attention.h"
#include "core/element.h"
#include "core/kernels.h"

namespace tq {

class CacheRows {
 public:
  CacheRows(const Kernels& kernels, const CacheView& cache, Element element, int head_size);

  // Width of the queries' and sums' rows, which are in slot order (core/kernels.h).
  int padded() const { return padded_; }
  int coordinates() const { return spec::coordinates(codec_, head_size_); }
  void to_slots(const float* natural, float* slotted) const;
  void to_natural(const float* slotted, float* natural) const;

  // Row `index` of the tensor.
  const uint8_t* row(int64_t index) const { return rows_ + index * stride_; }

  // A coordinate is scale * number + zero; blocks of up to kBlock rows.
  bool has_zeros() const { return codec_.kind == spec::Kind::kUniform; }
  void scales(const uint8_t* rows, int count, float* out) const;
  void zeros(const uint8_t* rows, int count, const float* scales, float* out) const;

  // Floats of `work` that the next two want for so many queries.
  std::size_t work_size(int queries) const;

  // scores[r][t] = <query[r], numbers of row t>.
  void score(const uint8_t* rows, int count, const float* query, int queries, float* work,
             float* scores) const;

  // sums[r] += sum over t of weights[r][t] * numbers of row t. A weight of zero adds nothing.
  void accumulate(const uint8_t* rows, int count, const float* weights, int queries, float* work,
                  float* sums) const;

 private:
  bool is_coded() const;
  bool is_fused(int queries) const { return queries <= kernels_.max_fused && is_coded(); }
  void decode(const uint8_t* rows, int count, float* values) const;
  void decode_row(const uint8_t* row, float* value) const;
  void decode_prod(const uint8_t* rows, int count, float* values) const;
  void add_strange_rows(const float* weights, int queries, float* values, int count,
                        float* sums) const;

  const Kernels& kernels_;
  const spec::Codec codec_;
  const Element element_;  // of raw rows
  const int head_size_;
  const uint8_t* const rows_;
  const int stride_;
  const int fields_;      // first byte of the fields
  const RowFormat code_;  // of the planes, for prod of the index
  const RowFormat sign_;  // of the signs of prod
  const int padded_;
  float table_[kTable];
};

}  // namespace tq
