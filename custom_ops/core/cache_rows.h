// The rows of one cache, as attention reads them: queries against keys, weights against values.
//
// Two kinds of codecs. Coded ones (lloyd_max, uniform, u8): products are taken with the centroids
// of the codes, in registers for few queries or decoded to memory for many, and a row's scale, for
// uniform also its zero, is left to the caller. The others (raw, fp8_e4m3, q8_0, prod): coordinates
// with everything that their fields say, in registers or decoded to memory likewise; the scales are
// ones. A row of prod is two, one of the index and one of the signs, with a scale each.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/attention.h"
#include "core/element.h"
#include "core/kernels.h"

namespace tq {

class CacheRows {
 public:
  // `may_round`: products may be taken with integers, see IntegerKernels.
  CacheRows(const Kernels& kernels, const CacheView& cache, Element element, int head_size,
            bool may_round);

  int coordinates() const { return spec::coordinates(codec_, head_size_); }

  // Queries and sums lie as the kernels want them: in slot order (core/kernels.h), or as integers
  // and in the order of their words (core/simd/integer.inl).
  int query_width() const { return query_width_ + sign_query_width_; }
  int sums_width() const { return sums_width_ + sign_sums_width_; }
  void prepare_query(const float* natural, float* prepared) const;
  void natural_sums(const float* sums, float* natural) const;

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

  // Where products are taken with integers, a row of weights may be prepared for itself: numbers has
  // kNumbersFloats floats. What is not finite goes into its sum at once.
  bool is_integer() const { return has_integers() && is_coded(); }
  void quantise(const uint8_t* rows, int count, const float* weights, float* numbers,
                float* sum) const;
  void accumulate_numbers(const uint8_t* rows, int count, const float* numbers, int queries,
                          float* sums) const;

 private:
  bool is_coded() const;
  void read_integers();
  std::size_t slots_size(int queries) const;
  void accumulate_strange(const RowFormat& format, const uint8_t* rows, int count,
                          const float* table, const float* weights, float* sum) const;
  bool has_integers() const { return integers_.unit > 0.0f; }
  bool is_prod() const { return codec_.kind == spec::Kind::kProd; }
  bool is_fused(int queries) const;
  // Of prod; `work` has prod_size(queries) floats.
  std::size_t prod_size(int queries) const;
  const uint8_t* signs(const uint8_t* rows) const { return rows + signs_; }
  int query_width_of(const RowFormat& format) const;
  int sums_width_of(const RowFormat& format) const;
  void prepare_part(const RowFormat& format, const float* natural, float* prepared) const;
  void natural_part(const RowFormat& format, const float* sums, float* natural) const;
  void score_part(const RowFormat& format, const uint8_t* rows, int count, const float* table,
                  const IntegerTable& integers, const float* query, int queries,
                  float* scores) const;
  void accumulate_part(const RowFormat& format, const uint8_t* rows, int count, const float* table,
                       const IntegerTable& integers, const float* weights, int queries, int first,
                       int width, float* work, float* sums) const;
  void load_scales(const uint8_t* rows, int count, float* index, float* sign) const;
  void score_prod(const uint8_t* rows, int count, const float* query, int queries, float* work,
                  float* scores) const;
  void accumulate_prod(const uint8_t* rows, int count, const float* weights, int queries,
                       float* work, float* sums) const;
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
  const int signs_;       // first byte of the signs of prod
  const ByteFormat bytes_;  // of raw, fp8_e4m3 and q8_0
  const int padded_;
  float table_[kTable];
  IntegerTable integers_{};  // its unit is 0 where codes are no integers
  int query_width_, sums_width_;  // without the signs of prod, which follow
  int sign_query_width_ = 0, sign_sums_width_ = 0;
};

}  // namespace tq
