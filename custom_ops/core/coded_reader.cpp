// Rows of lloyd_max, uniform, uniform_signed and u8: the codes of one codebook, then a scale, of uniform
// also a zero.
//
// Integer products round weights to steps without a sign. So those of rows of uniform_signed with
// negative scales are a part of their own, with centroids of the other sign and the same sums.

#include "core/coded_part.h"
#include "core/readers.h"
#include "core/row_format.h"

namespace tq {
namespace {

class CodedReader final : public RowReader {
 public:
  CodedReader(const Kernels& kernels, const CacheView& cache, int head_size, const CodedPart& part)
      : RowReader(kernels, cache, head_size,
                  {part.query_width(), part.sums_width(), part.padded(),
                   has_signs(cache, part) ? 2 : 1, part.is_integer(),
                   spec::has_zero(cache.codec.kind), false}),
        part_(part),
        negative_(part.negative()) {}

  void prepare_query(const float* natural, float* prepared) const override {
    part_.prepare_query(natural, prepared);
  }
  void natural_sums(const float* sums, float* natural) const override {
    part_.natural_sums(sums, natural);
  }
  void scales(const uint8_t* rows, int count, float* out) const override {
    load_scales(kernels(), codec(), rows + fields(), stride(), count, out);
  }
  void weight_scales(const uint8_t* rows, int count, float* out) const override {
    scales(rows, count, out);
    for (int t = 0; t < kBlock && parts() > 1; ++t) {
      out[kBlock + t] = out[t] < 0.0f ? -out[t] : 0.0f;
      out[t] = out[t] < 0.0f ? 0.0f : out[t];
    }
  }
  void scales_and_zeros(const uint8_t* rows, int count, float* scales,
                        float* zeros) const override {
    kernels().load_field_pairs(rows + fields(), stride(), count, scales, zeros);
    const float middle = 0.5f * static_cast<float>((1 << codec().bits) - 1);
    for (int t = 0; t < kBlock; ++t) zeros[t] += scales[t] * middle;
  }
  int largest(int) const override { return part_.largest(); }
  void quantise(const uint8_t* rows, int count, const float* weights, const PartScales& scales,
                float* operands, float* sum) const override {
    if (parts() == 1) return part_.quantise(rows, count, weights, operands, sum);
    alignas(64) float scaled[kBlock];
    kernels().apply_fields(weights, scales.scales, nullptr, count, scaled);
    part_.quantise(rows, count, scaled, operands, sum);
    kernels().apply_fields(weights, scales.scales + kBlock, nullptr, count, scaled);
    negative_.quantise(rows, count, scaled, operands + scales.pitch, sum);
  }
  void accumulate_operands(const uint8_t* rows, int count, const float* operands,
                           std::ptrdiff_t pitch, int queries, float* sums,
                           PrefetchRange prefetch) const override {
    part_.accumulate_operands(rows, count, operands, queries, sums, sums_width(), prefetch);
    if (parts() == 1) return;
    negative_.accumulate_operands(rows, count, operands + pitch, queries, sums, sums_width(), {});
  }

 private:
  bool is_fused(int queries) const override {
    return is_integer() || queries <= kernels().max_fused;
  }
  std::size_t fused_work_size(int queries) const override {
    return is_integer() ? static_cast<std::size_t>(queries) * kOperandFloats : 0;
  }
  void score_fused(const uint8_t* rows, int count, const float* query, int queries, float*,
                   float* scores, PrefetchRange prefetch) const override {
    part_.score(rows, count, query, query_width(), queries, scores, prefetch);
  }
  void accumulate_fused(const uint8_t* rows, int count, const float* weights, int queries, float*,
                        float* sums) const override {
    part_.accumulate(rows, count, weights, queries, sums);
  }
  void decode_rows(const uint8_t* rows, int count, float* values) const override {
    part_.decode_rows(rows, count, values);
  }
  void decode_columns(const uint8_t* rows, int count, float* keys) const override {
    part_.decode_columns(rows, count, keys);
  }

  static bool has_signs(const CacheView& cache, const CodedPart& part) {
    return spec::is_signed(cache.codec.kind) && part.is_integer();
  }

  const CodedPart part_, negative_;
};

}  // namespace

std::unique_ptr<const RowReader> make_coded_reader(const Kernels& kernels, const CacheView& cache,
                                                   int head_size) {
  return std::make_unique<CodedReader>(
      kernels, cache, head_size,
      first_part(kernels, cache, head_size, kernels.integers != nullptr));
}

}  // namespace tq
