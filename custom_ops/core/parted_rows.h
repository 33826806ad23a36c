// Rows of prod: each is two parts, the codes of an index and the signs of what the index misses,
// with a scale each. A vector of coordinates is that of the index, then that of the signs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/attention.h"
#include "core/coded_part.h"
#include "core/kernels.h"

namespace tq {

// As CacheRows, which has the meaning of all of it; numbers come with their scales.
class ProdRows {
 public:
  // The signs are integers where the index is.
  ProdRows(const Kernels& kernels, const CacheView& cache, int head_size, const CodedPart& index);

  int padded() const { return index_.padded() + signs_.padded(); }
  int query_width() const { return index_.query_width() + signs_.query_width(); }
  int sums_width() const { return index_.sums_width() + signs_.sums_width(); }
  void prepare_query(const float* natural, float* prepared) const;
  void natural_sums(const float* sums, float* natural) const;

  // Whether so many queries are multiplied in registers; `work` has work_size(queries) floats.
  bool is_fused(int queries) const;
  std::size_t work_size(int queries) const;
  void score(const uint8_t* rows, int count, const float* query, int queries, float* work,
             float* scores) const;
  void accumulate(const uint8_t* rows, int count, const float* weights, int queries, float* work,
                  float* sums) const;

  // values[t][j], leading dimension padded().
  void decode(const uint8_t* rows, int count, float* values) const;

 private:
  // kBlock each: a coordinate is index scale * centroid, or sign scale * (+-1).
  void load_scales(const uint8_t* rows, int count, float* index, float* sign) const;
  const uint8_t* signs(const uint8_t* rows) const { return rows + signs_at_; }
  void score_part(const CodedPart& part, const uint8_t* rows, int count, const float* query,
                  int queries, float* work, float* scores, Ahead ahead) const;
  void accumulate_part(const CodedPart& part, const uint8_t* rows, int count, const float* weights,
                       int queries, float* work, float* sums, Ahead ahead) const;

  const Kernels& kernels_;
  const int head_size_;
  const int stride_;
  const int fields_;    // first byte of the scales
  const int signs_at_;  // first byte of the signs
  const CodedPart index_, signs_;
};

}  // namespace tq
