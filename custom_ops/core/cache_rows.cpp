// Blocks of rows of every codec; the contract is in cache_rows.h.
#include "core/cache_rows.h"

#include <algorithm>
#include <cstring>

#include "core/row_format.h"

namespace tq {
namespace {

using spec::Kind;

int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// Products are taken with what the codes stand for, and the fields are left to the caller.
bool is_coded(Kind kind) {
  return (spec::is_rotated(kind) && !PartedRows::covers(kind)) || spec::has_zero(kind);
}

// A byte or a float is 8: one slot, the natural order.
int bits_of_index(spec::Codec codec) {
  if (PartedRows::covers(codec.kind)) return spec::index_bits(codec);
  const spec::Planes planes = spec::planes(codec);
  return planes.count == 0 || planes.plane[0].width == 8 ? 8 : codec.bits;
}

float half_at(const uint8_t* bytes) {
  return half_to_float(static_cast<uint16_t>(bytes[0] | bytes[1] << 8));
}

ByteFormat byte_format(spec::Codec codec, Element element, int head_size, int lanes, int stride) {
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
  format.padded = round_up(head_size, lanes);
  format.scales = code_bytes;
  format.stride = stride;
  return format;
}
static_assert(kScaleBlock == spec::kQ8_0Block);

// What the codes stand for, of two parts those of the first: the codebook's centroids; of equal
// steps, whose numbers are left to scale and zero, codes from the middle of the range, so that little
// cancels between these two.
//
// Scores of keys with zeros bear integers, too. Let a query q be rounded to n steps of its largest
// coordinate, each off by a deviation of max |q| / (n sqrt(12)): that moves a score by at most
//   max |q| / (n sqrt(12)) * scale * sqrt(D) (2^bits - 1) / 2,
// where rounding the keys to their codes has moved it by |q| * scale / sqrt(12). With max |q| < |q|
// it is less than sqrt(D) (2^bits - 1) / (2 n) of that, however large the zeros are: 0.3 % at 16
// bits, D = 128 and 4-bit codes.
CodedPart coded_part(const Kernels& kernels, const CacheView& cache, int head_size) {
  const spec::Codec codec = cache.codec;
  const RowFormat format = row_format(
      bits_of_index(codec), spec::class_size(codec, 0, head_size), kernels.lanes, cache.stride,
      cache.end);
  float table[kTable] = {};
  std::optional<IntegerTable> integers;
  const bool may_round = kernels.integers != nullptr;
  if (spec::is_rotated(codec.kind)) {
    const int levels = 1 << spec::index_bits(codec);
    fill_table(cache.centroids, levels, table);
    if (may_round && PartedRows::may_round(cache)) {
      integers = integers_of(table, levels, kLargestInteger);
    }
  } else if (spec::has_zero(codec.kind)) {
    const int top = (1 << codec.bits) - 1;
    for (int i = 0; i < kTable; ++i) {
      table[i] = static_cast<float>(i % (top + 1)) - 0.5f * static_cast<float>(top);
    }
    if (may_round) integers = integers_of(table, top + 1, top);
  }
  return {kernels, format, table, integers};
}

}  // namespace

CacheRows::CacheRows(const Kernels& kernels, const CacheView& cache, Element element, int head_size)
    : kernels_(kernels),
      codec_(cache.codec),
      element_(raw_element(element, cache.codec.bits)),
      head_size_(head_size),
      rows_(cache.rows),
      stride_(cache.stride),
      fields_(spec::code_bytes(cache.codec, head_size)),
      bytes_(byte_format(cache.codec, element_, head_size, kernels.lanes, cache.stride)),
      code_(coded_part(kernels, cache, head_size)) {
  if (PartedRows::covers(codec_.kind)) parts_.emplace(kernels, cache, head_size, code_);
}

bool CacheRows::is_coded() const { return tq::is_coded(codec_.kind); }

void CacheRows::ask(PrefetchRange prefetch) {
#if defined(__GNUC__)
  // Into the second level, as the kernels do.
  for (std::ptrdiff_t i = 0; i < prefetch.bytes; i += kCacheLine) {
    __builtin_prefetch(prefetch.begin + i, 0, 2);
  }
#else
  static_cast<void>(prefetch);
#endif
}

void CacheRows::prepare_query(const float* natural, float* prepared) const {
  if (parts_) return parts_->prepare_query(natural, prepared);
  code_.prepare_query(natural, prepared);
}

void CacheRows::natural_sums(const float* sums, float* natural) const {
  if (parts_) return parts_->natural_sums(sums, natural);
  code_.natural_sums(sums, natural);
}

void CacheRows::scales(const uint8_t* rows, int count, float* out) const {
  if (!is_coded()) {
    std::fill_n(out, kBlock, 1.0f);
  } else if (codec_.kind == Kind::kU8) {
    for (int t = 0; t < count; ++t) {
      std::memcpy(out + t, rows + fields_ + static_cast<std::ptrdiff_t>(t) * stride_, sizeof *out);
    }
    std::fill(out + count, out + kBlock, 0.0f);
  } else {
    kernels_.load_fields(rows + fields_, stride_, count, out);
  }
}

void CacheRows::weight_scales(const uint8_t* rows, int count, float* out) const {
  if (parts_) return parts_->load_scales(rows, count, out, out + kBlock);
  scales(rows, count, out);
}

void CacheRows::quantise(const uint8_t* rows, int count, const float* weights,
                         const PartScales& scales, float* numbers, float* sum) const {
  if (parts_) return parts_->quantise(rows, count, weights, scales, numbers, sum);
  code_.quantise(rows, count, weights, numbers, sum);
}

void CacheRows::accumulate_numbers(const uint8_t* rows, int count, const float* numbers,
                                   std::ptrdiff_t pitch, int queries, float* sums,
                                   PrefetchRange prefetch) const {
  if (parts_) {
    return parts_->accumulate_numbers(rows, count, numbers, pitch, queries, sums, prefetch);
  }
  code_.accumulate_numbers(rows, count, numbers, queries, sums, sums_width(), prefetch);
}

void CacheRows::scales_and_zeros(const uint8_t* rows, int count, float* scales,
                                 float* zeros) const {
  kernels_.load_field_pairs(rows + fields_, stride_, count, scales, zeros);
  const float middle = 0.5f * static_cast<float>((1 << codec_.bits) - 1);
  for (int t = 0; t < kBlock; ++t) zeros[t] += scales[t] * middle;
}

bool CacheRows::is_fused(int queries) const {
  if (parts_) return parts_->is_fused(queries);
  if (!is_coded()) return queries <= kernels_.max_fused_bytes;
  return code_.is_integer() || queries <= kernels_.max_fused;
}

std::size_t CacheRows::work_size(int queries) const {
  if (is_fused(queries)) {
    if (parts_) return parts_->work_size(queries);
    return is_integer() ? static_cast<std::size_t>(queries) * kOperandFloats : 0;
  }
  const std::size_t block = static_cast<std::size_t>(kBlock) * padded();
  return is_coded() ? block : 2 * block;
}

void CacheRows::score(const uint8_t* rows, int count, const float* query, int queries, float* work,
                      float* scores, PrefetchRange prefetch) const {
  if (is_fused(queries)) {
    if (parts_) return parts_->score(rows, count, query, queries, work, scores, prefetch);
    if (!is_coded()) return kernels_.score_bytes(bytes_, rows, count, query, queries, scores);
    return code_.score(rows, count, query, query_width(), queries, scores, prefetch);
  }
  const int width = padded();
  if (is_coded()) {
    code_.decode_columns(rows, count, work);
  } else {
    float* const values = work + static_cast<std::size_t>(kBlock) * width;
    decode(rows, count, values);
    kernels_.transpose_block(values, count, width, work);
  }
  kernels_.multiply(query, width, work, kBlock, scores, kBlock, queries,
                    round_up(count, kernels_.lanes), width, false);
}

void CacheRows::accumulate(const uint8_t* rows, int count, const float* weights, int queries,
                           float* work, float* sums) const {
  if (is_fused(queries)) {
    if (parts_) return parts_->accumulate(rows, count, weights, queries, work, sums);
    if (!is_coded()) {
      return kernels_.accumulate_bytes(bytes_, rows, count, weights, queries, sums);
    }
    return code_.accumulate(rows, count, weights, queries, sums);
  }
  const int width = padded();
  if (is_coded()) {
    code_.decode_rows(rows, count, work);
  } else {
    decode(rows, count, work);
    add_nonfinite_rows(weights, queries, work, count, sums);
  }
  kernels_.multiply(weights, kBlock, work, width, sums, width, queries, width, count, true);
}

// In a product of matrices, zero times infinity would spoil queries that do not see a row. Rows
// that are not finite are added here and left out there.
void CacheRows::add_nonfinite_rows(const float* weights, int queries, float* values, int count,
                                 float* sums) const {
  const int width = padded();
  for (int t = 0; t < count; ++t) {
    float* const value = values + static_cast<std::ptrdiff_t>(t) * width;
    if (is_finite(value, width)) continue;
    for (int r = 0; r < queries; ++r) {
      const float weight = weights[r * kBlock + t];
      if (weight == 0.0f) continue;
      float* const sum = sums + static_cast<std::ptrdiff_t>(r) * width;
      for (int j = 0; j < width; ++j) sum[j] += weight * value[j];
    }
    std::fill_n(value, width, 0.0f);
  }
}

// values[t][j], leading dimension padded().
void CacheRows::decode(const uint8_t* rows, int count, float* values) const {
  if (parts_) return parts_->decode(rows, count, values);
  const int width = padded();
  for (int t = 0; t < count; ++t, rows += stride_, values += width) {
    decode_row(rows, values);
    std::fill(values + head_size_, values + width, 0.0f);
  }
}

void CacheRows::decode_row(const uint8_t* row, float* value) const {
  switch (codec_.kind) {
    case Kind::kFp8E4m3:
      return kernels_.decode_fp8(row, value, head_size_);
    case Kind::kQ8_0:
      for (int from = 0, block = 0; from < head_size_; from += spec::kQ8_0Block, ++block) {
        kernels_.decode_int8(row + from, half_at(row + fields_ + 2 * block), value + from,
                             std::min(spec::kQ8_0Block, head_size_ - from));
      }
      return;
    default: {
      // A cache may lie at any address, the conversions want whole elements.
      alignas(64) uint16_t aligned[spec::kMaxHeadSize * sizeof(float) / sizeof(uint16_t)];
      std::memcpy(aligned, row, static_cast<std::size_t>(fields_));
      load_floats(kernels_, element_, aligned, 0, value, static_cast<std::size_t>(head_size_));
    }
  }
}

}  // namespace tq
