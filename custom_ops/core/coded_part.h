// The codes of one codebook in the rows of a cache, and products with their centroids: in integers if
// the centroids are multiples of a unit, else in floats.
//
// Rows of lloyd_max, uniform, uniform_signed and u8 have one such part, rows of prod two. The reader of
// the rows applies the scales.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "core/attention_call.h"
#include "core/kernels.h"

namespace tq {

class CodedPart {
 public:
  // `table` has kTable centroids. With `integers`, which are the same, products are integers.
  CodedPart(const Kernels& kernels, const RowFormat& format, const float* table,
            const std::optional<IntegerTable>& integers);
  // The same codes with centroids of the other sign.
  CodedPart negative() const;

  bool is_integer() const { return integers_.has_value(); }
  int padded() const { return format_.padded; }  // width of a decoded row
  int largest() const { return is_integer() ? integers_->largest : 0; }  // integer

  // Queries and sums lie as the kernels want them: in slot order (core/kernels.h), or as integers
  // and in the order of their words (core/simd/integer.inl).
  int query_width() const { return query_width_; }
  int sums_width() const { return sums_width_; }
  void prepare_query(const float* natural, float* prepared) const;
  void natural_sums(const float* sums, float* natural) const;

  // In registers, of up to kBlock rows; of floats for up to max_fused queries only. Integer products
  // prefetch what is asked for and have rows of queries that are `pitch` floats apart; others prefetch
  // what they read next, and rows lie one after the other.
  void score(const uint8_t* rows, int count, const float* query, int pitch, int queries,
             float* scores, PrefetchRange prefetch) const;
  void accumulate(const uint8_t* rows, int count, const float* weights, int queries,
                  float* sums) const;

  // Where is_integer(), in two steps, see RowReader; sums are `pitch` floats apart.
  void quantise(const uint8_t* rows, int count, const float* weights, float* operands,
                float* sum) const;
  void accumulate_operands(const uint8_t* rows, int count, const float* operands, int queries,
                           float* sums, int pitch, PrefetchRange prefetch) const;

  // Centroids in slot order, as Kernels has these.
  void decode_rows(const uint8_t* rows, int count, float* values) const;
  void decode_columns(const uint8_t* rows, int count, float* keys) const;

 private:
  void accumulate_nonfinite(const uint8_t* rows, int count, const float* weights, float* sum) const;

  const Kernels& kernels_;
  const RowFormat format_;
  float table_[kTable];
  std::optional<IntegerTable> integers_;
  const int query_width_, sums_width_;
};

// The codes at the beginning of the rows of a cache; products are taken with integers if they may.
CodedPart first_part(const Kernels& kernels, const CacheView& cache, int head_size, bool may_round);

}  // namespace tq
