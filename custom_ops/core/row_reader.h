// Reads the rows of one cache for attention: products of queries with keys, of weights with values.
//
// The codec chooses a reader once per cache:
//   CodedReader    lloyd_max, uniform, uniform_signed, u8: products with the centroids of the codes; the caller
//                  applies the scale of a row, and for uniform its zero
//   TwoPartReader  prod: the same of two parts, with the scale of each
//   ByteReader     raw, fp8_e4m3, q8_0: coordinates that are bytes or floats
// Each multiplies in registers for few queries, and decodes rows to memory for many.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/attention_call.h"
#include "core/kernels.h"

namespace tq {

class RowReader {
 public:
  virtual ~RowReader() = default;
  RowReader(const RowReader&) = delete;
  RowReader& operator=(const RowReader&) = delete;

  int coordinates() const { return spec::coordinates(codec_, head_size_); }

  // ---- where rows lie
  const CacheView& cache() const { return cache_; }
  const uint8_t* behind(const uint8_t* rows, int count) const {
    return rows + static_cast<std::ptrdiff_t>(count) * stride_;
  }
  // From share `from` to share `to` of the bytes of rows; nothing of rows that are null.
  PrefetchRange prefetch_range(const uint8_t* rows, int count, float from, float to) const {
    if (rows == nullptr) return {};
    const float bytes = static_cast<float>(count) * static_cast<float>(stride_);
    const std::ptrdiff_t first = static_cast<std::ptrdiff_t>(from * bytes);
    return {rows + first, static_cast<std::ptrdiff_t>(to * bytes) - first};
  }

  // ---- queries and sums, which lie as the kernels want them
  int query_width() const { return layout_.query_width; }
  int sums_width() const { return layout_.sums_width; }
  virtual void prepare_query(const float* natural, float* prepared) const = 0;
  virtual void natural_sums(const float* sums, float* natural) const = 0;

  // ---- fields of up to kBlock rows: a coordinate is scale * number + zero
  bool has_zeros() const { return layout_.has_zeros; }
  // Ones where numbers come with their scales.
  virtual void scales(const uint8_t* rows, int count, float* out) const;
  // Where has_zeros().
  virtual void scales_and_zeros(const uint8_t* rows, int count, float* scales, float* zeros) const;

  // ---- products
  // Floats of `work` that the next two want for so many queries.
  std::size_t work_size(int queries) const;
  // scores[r][t] = <query[r], numbers of row t>. Integer products prefetch what is asked for.
  void score(const uint8_t* rows, int count, const float* query, int queries, float* work,
             float* scores, PrefetchRange prefetch) const;
  // sums[r] += sum over t of weights[r][t] * numbers of row t. A weight of zero adds nothing. Not
  // where is_integer().
  void accumulate(const uint8_t* rows, int count, const float* weights, int queries, float* work,
                  float* sums) const;

  // ---- integer products, which round weights first, times the scales of the parts of their rows
  bool is_integer() const { return layout_.is_integer; }
  // Of what a block prefetches of keys: while it scores.
  float prefetch_share() const { return is_integer() ? kernels_.integers->key_share : 1.0f; }
  int parts() const { return layout_.parts; }
  virtual int largest(int part) const;  // integer
  // kBlock of each part.
  virtual void weight_scales(const uint8_t* rows, int count, float* out) const;
  // Rounds a row of weights, of one part with its scales in it, of several without. Its operands have
  // kOperandFloats floats of each part, scales.pitch floats apart; what is not finite goes into its
  // sum at once.
  virtual void quantise(const uint8_t* rows, int count, const float* weights,
                        const PartScales& scales, float* operands, float* sum) const;
  virtual void accumulate_operands(const uint8_t* rows, int count, const float* operands,
                                   std::ptrdiff_t pitch, int queries, float* sums,
                                   PrefetchRange prefetch) const;

 protected:
  struct Layout {
    int query_width, sums_width;
    int padded;  // floats of a decoded row
    int parts;
    bool is_integer, has_zeros;
    bool is_scaled;  // decoded rows come with their scales, and may not be finite
  };

  RowReader(const Kernels& kernels, const CacheView& cache, int head_size, const Layout& layout);

  const Kernels& kernels() const { return kernels_; }
  spec::Codec codec() const { return codec_; }
  int head_size() const { return head_size_; }
  int stride() const { return stride_; }
  int fields() const { return fields_; }  // first byte of the fields
  int padded() const { return layout_.padded; }

 private:
  // Whether so many queries are multiplied in registers.
  virtual bool is_fused(int queries) const = 0;
  virtual std::size_t fused_work_size(int queries) const = 0;
  virtual void score_fused(const uint8_t* rows, int count, const float* query, int queries,
                           float* work, float* scores, PrefetchRange prefetch) const = 0;
  virtual void accumulate_fused(const uint8_t* rows, int count, const float* weights, int queries,
                                float* work, float* sums) const = 0;
  // values[t][j], leading dimension padded().
  virtual void decode_rows(const uint8_t* rows, int count, float* values) const = 0;
  // keys[j][t], leading dimension kBlock; there is room for as many floats behind them.
  virtual void decode_columns(const uint8_t* rows, int count, float* keys) const;
  void add_nonfinite_rows(const float* weights, int queries, float* values, int count,
                          float* sums) const;

  const Kernels& kernels_;
  const spec::Codec codec_;
  const int head_size_;
  const CacheView cache_;
  const int stride_;
  const int fields_;
  const Layout layout_;
};

// Products are taken with integers where the kernels have these and the codebook is made of them.
std::unique_ptr<const RowReader> make_row_reader(const Kernels& kernels, const CacheView& cache,
                                                 Element element, int head_size);

}  // namespace tq
