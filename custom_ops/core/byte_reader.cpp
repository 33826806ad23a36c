// Rows of raw, fp8_e4m3 and q8_0: a coordinate is a byte or a float; numbers come with all fields.
#include <algorithm>
#include <cstring>

#include "core/half.h"
#include "core/readers.h"

namespace tq {
namespace {

using spec::Kind;

static_assert(kScaleBlock == spec::kQ8_0Block);

ByteFormat byte_format(const Kernels& kernels, const CacheView& cache, Element element,
                       int head_size) {
  const spec::Codec codec = cache.codec;
  Coordinate kind = Coordinate::kFloat;
  if (codec.kind == Kind::kFp8E4m3) kind = Coordinate::kFp8;
  if (codec.kind == Kind::kQ8_0) kind = Coordinate::kInt8;
  if (codec.kind == Kind::kRaw && element == Element::kHalf) kind = Coordinate::kHalf;
  if (codec.kind == Kind::kRaw && element == Element::kBfloat) kind = Coordinate::kBfloat;
  const int code_bytes = spec::code_bytes(codec, head_size);
  ByteFormat format{};
  format.kind = kind;
  format.bytes = code_bytes / head_size;
  format.head_size = head_size;
  format.padded = (head_size + kernels.lanes - 1) / kernels.lanes * kernels.lanes;
  format.scales = code_bytes;
  format.stride = cache.stride;
  return format;
}

float half_at(const uint8_t* bytes) {
  return half_to_float(static_cast<uint16_t>(bytes[0] | bytes[1] << 8));
}

class ByteReader final : public RowReader {
 public:
  ByteReader(const Kernels& kernels, const CacheView& cache, Element element, int head_size,
             const ByteFormat& format)
      : RowReader(kernels, cache, head_size,
                  {format.padded, format.padded, format.padded, 1, false, false, true}),
        element_(element),
        format_(format) {}

  void prepare_query(const float* natural, float* prepared) const override {
    std::copy_n(natural, head_size(), prepared);
    std::fill(prepared + head_size(), prepared + padded(), 0.0f);
  }
  void natural_sums(const float* sums, float* natural) const override {
    std::copy_n(sums, head_size(), natural);
  }

 private:
  bool is_fused(int queries) const override { return queries <= kernels().max_fused_bytes; }
  std::size_t fused_work_size(int) const override { return 0; }
  void score_fused(const uint8_t* rows, int count, const float* query, int queries, float*,
                   float* scores, PrefetchRange) const override {
    kernels().score_bytes(format_, rows, count, query, queries, scores);
  }
  void accumulate_fused(const uint8_t* rows, int count, const float* weights, int queries, float*,
                        float* sums) const override {
    kernels().accumulate_bytes(format_, rows, count, weights, queries, sums);
  }
  void decode_rows(const uint8_t* rows, int count, float* values) const override {
    for (int t = 0; t < count; ++t, rows += stride(), values += padded()) {
      decode_row(rows, values);
      std::fill(values + head_size(), values + padded(), 0.0f);
    }
  }

  void decode_row(const uint8_t* row, float* value) const {
    switch (codec().kind) {
      case Kind::kFp8E4m3:
        return kernels().decode_fp8(row, value, head_size());
      case Kind::kQ8_0:
        for (int from = 0, block = 0; from < head_size(); from += spec::kQ8_0Block, ++block) {
          kernels().decode_int8(row + from, half_at(row + fields() + 2 * block), value + from,
                                std::min(spec::kQ8_0Block, head_size() - from));
        }
        return;
      default: {
        // A cache may lie at any address, the conversions want whole elements.
        alignas(64) uint16_t aligned[spec::kMaxHeadSize * sizeof(float) / sizeof(uint16_t)];
        std::memcpy(aligned, row, static_cast<std::size_t>(fields()));
        load_floats(kernels(), element_, aligned, 0, value, static_cast<std::size_t>(head_size()));
      }
    }
  }

  const Element element_;  // of raw rows
  const ByteFormat format_;
};

}  // namespace

std::unique_ptr<const RowReader> make_byte_reader(const Kernels& kernels, const CacheView& cache,
                                                  Element element, int head_size) {
  const Element of_rows = raw_element(element, cache.codec.bits);
  return std::make_unique<ByteReader>(kernels, cache, of_rows, head_size,
                                      byte_format(kernels, cache, of_rows, head_size));
}

}  // namespace tq
