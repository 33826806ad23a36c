// Rows of two parts with a scale each: of prod the codes of an index and the signs of what the index
// misses, of split kinds two classes of coordinates. A vector of coordinates is that of the first
// part, then that of the second.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/attention.h"
#include "core/coded_part.h"
#include "core/kernels.h"

namespace tq {

// As CacheRows, which has the meaning of all of it; numbers come with their scales.
class PartedRows {
 public:
  static bool covers(spec::Kind kind) { return spec::has_sketch(kind) || spec::is_split(kind); }

  // Whether the codebook of the second part is made of integers, if it has one.
  static bool may_round(const CacheView& cache);

  // The second part is of integers where the first one is.
  PartedRows(const Kernels& kernels, const CacheView& cache, int head_size, const CodedPart& first);

  int padded() const { return first_.padded() + second_.padded(); }
  int query_width() const { return first_.query_width() + second_.query_width(); }
  int sums_width() const { return first_.sums_width() + second_.sums_width(); }
  void prepare_query(const float* natural, float* prepared) const;
  void natural_sums(const float* sums, float* natural) const;

  // Whether so many queries are multiplied in registers; `work` has work_size(queries) floats.
  bool is_fused(int queries) const;
  std::size_t work_size(int queries) const;
  void score(const uint8_t* rows, int count, const float* query, int queries, float* work,
             float* scores, PrefetchRange prefetch) const;
  void accumulate(const uint8_t* rows, int count, const float* weights, int queries, float* work,
                  float* sums) const;

  // kBlock each: what the centroids of a part, or the signs, are multiplied with.
  void load_scales(const uint8_t* rows, int count, float* first, float* second) const;

  // Of integers.
  void quantise(const uint8_t* rows, int count, const float* weights, const PartScales& scales,
                float* numbers, float* sum) const;
  void accumulate_numbers(const uint8_t* rows, int count, const float* numbers,
                          std::ptrdiff_t pitch, int queries, float* sums, PrefetchRange prefetch) const;

  // values[t][j], leading dimension padded().
  void decode(const uint8_t* rows, int count, float* values) const;

 private:
  const uint8_t* second(const uint8_t* rows) const { return rows + second_at_; }
  // The share of the first part of what memory is asked for.
  PrefetchRange begin_of(PrefetchRange prefetch) const { return {prefetch.begin, prefetch.bytes / 2}; }
  PrefetchRange rest_of(PrefetchRange prefetch) const {
    return {prefetch.begin + prefetch.bytes / 2, prefetch.bytes - prefetch.bytes / 2};
  }
  void score_part(const CodedPart& part, const uint8_t* rows, int count, const float* query,
                  int queries, float* work, float* scores, PrefetchRange prefetch) const;
  void accumulate_part(const CodedPart& part, const uint8_t* rows, int count, const float* weights,
                       int queries, float* work, float* sums) const;

  const Kernels& kernels_;
  const spec::Codec codec_;
  const int head_size_;
  const int stride_;
  const int fields_;      // first byte of the scales
  const int first_size_;  // coordinates of the first part
  const int second_at_;   // first byte of the second part
  const CodedPart first_, second_;
};

}  // namespace tq
