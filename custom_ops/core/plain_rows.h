// Decodes rows of lloyd_max and uniform_signed for a prefill, block by block, to centroids or to integers (centroids divided
// by a unit). Scales are loaded separately.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "core/attention_call.h"
#include "core/kernels.h"
#include "core/row_format.h"

namespace tq {

class PlainRows {
 public:
  PlainRows(const Kernels& kernels, const CacheView& cache, int head_size);

  // Whether every centroid is an integer times `unit`, and the kernels have products of pairs.
  bool is_integer() const { return integers_.has_value(); }
  float unit() const { return integers_->unit; }
  const RowFormat& format() const { return format_; }

  // Of queries and sums, which are in slot order (core/kernels.h).
  std::size_t width() const { return static_cast<std::size_t>(format_.padded); }

  // Rows one after the other, as Kernels and PairKernels lay them out; words where is_integer().
  void decode_keys(const uint8_t* rows, int count, float* out) const;
  void decode_keys(const uint8_t* rows, int count, int32_t* out) const;
  void decode_values(const uint8_t* rows, int count, float* out) const;
  void decode_values(const uint8_t* rows, int count, int32_t* out) const;
  void scales(const uint8_t* rows, int count, float* out) const;

 private:
  // body(rows, count, index of the first) for every kBlock rows.
  template <class Body>
  void for_each_block(const uint8_t* rows, int count, const Body& body) const;

  const Kernels& kernels_;
  const CacheView& cache_;
  const RowFormat format_;
  const int fields_;  // first byte of the scale
  float table_[kTable];
  std::optional<IntegerTable> integers_;
};

}  // namespace tq
