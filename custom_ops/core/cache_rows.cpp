// Blocks of rows of every codec; the contract is in cache_rows.h.
#include "core/cache_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/row_format.h"

namespace tq {
namespace {

using spec::Kind;

int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

int bits_of_index(spec::Codec codec) {
  switch (codec.kind) {
    case Kind::kProd:
      return spec::index_bits(codec);
    case Kind::kLloydMax:
    case Kind::kUniform:
      return codec.bits;
    default:
      return 8;  // a byte or a float: one slot, the natural order
  }
}

float half_at(const uint8_t* bytes) {
  return half_to_float(static_cast<uint16_t>(bytes[0] | bytes[1] << 8));
}

// sqrt(pi / 2)
constexpr double kRootOfHalfPi = 1.2533141373155002512;

// Codes of more levels are no 8-bit integers.
constexpr int kIntegerLevels = 16;

// Of the largest centroid: what float32 leaves of a product.
constexpr float kSameNumber = 1e-6f;

// Query rows of prod that are multiplied in registers at every level.
constexpr int kMaxFusedProd = 16;

ByteFormat byte_format(spec::Codec codec, Element element, int head_size, int lanes, int stride) {
  Coordinate kind = Coordinate::kFloat;
  if (codec.kind == Kind::kFp8E4m3) kind = Coordinate::kFp8;
  if (codec.kind == Kind::kQ8_0) kind = Coordinate::kInt8;
  if (codec.kind == Kind::kRaw && element == Element::kHalf) kind = Coordinate::kHalf;
  if (codec.kind == Kind::kRaw && element == Element::kBfloat) kind = Coordinate::kBfloat;
  const int code_bytes = spec::code_bytes(codec, head_size);
  return {kind,      code_bytes / head_size, head_size, round_up(head_size, lanes), code_bytes,
          stride};
}
static_assert(kScaleBlock == spec::kQ8_0Block);

constexpr float kSigns[kTable] = {-1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1,
                                  -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1};
constexpr IntegerTable kIntegerSigns = {{-1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1},
                                        1.0f};

}  // namespace

CacheRows::CacheRows(const Kernels& kernels, const CacheView& cache, Element element, int head_size,
                     bool may_round)
    : kernels_(kernels),
      codec_(cache.codec),
      element_(raw_element(element, cache.codec.bits)),
      head_size_(head_size),
      rows_(cache.rows),
      stride_(cache.stride),
      fields_(spec::code_bytes(cache.codec, head_size)),
      code_(row_format(bits_of_index(cache.codec), head_size, kernels.lanes, cache.stride)),
      sign_(row_format(1, head_size, kernels.lanes, cache.stride)),
      signs_(spec::plane_offset(cache.codec, spec::planes(cache.codec).count - 1, head_size)),
      bytes_(byte_format(cache.codec, element_, head_size, kernels.lanes, cache.stride)),
      padded_(code_.padded + (codec_.kind == Kind::kProd ? sign_.padded : 0)) {
  if (spec::is_rotated(codec_.kind)) {
    fill_table(cache.centroids, spec::levels(codec_), table_);
  } else if (has_zeros()) {
    // Codes from the middle of the range, so that little cancels between scale and zero.
    const int top = (1 << codec_.bits) - 1;
    for (int i = 0; i < kTable; ++i) {
      table_[i] = static_cast<float>(i % (top + 1)) - 0.5f * static_cast<float>(top);
    }
  }
  if (may_round && (is_coded() || is_prod()) && kernels.integers != nullptr &&
      spec::levels(codec_) <= kIntegerLevels) {
    read_integers();
  }
  query_width_ = query_width_of(code_);
  sums_width_ = sums_width_of(code_);
  if (is_prod()) {
    sign_query_width_ = query_width_of(sign_);
    sign_sums_width_ = sums_width_of(sign_);
  }
}

// Where every number of the table is a multiple of 1/127 of the largest, or of a half.
void CacheRows::read_integers() {
  float largest = 0.0f;
  for (int i = 0; i < kIntegerLevels; ++i) largest = std::max(largest, std::fabs(table_[i]));
  const float unit = has_zeros() ? 0.5f : largest / 127.0f;
  if (!std::isnormal(unit)) return;
  IntegerTable integers{};
  for (int i = 0; i < kIntegerLevels; ++i) {
    const float number = std::nearbyint(table_[i] / unit);
    if (!(std::fabs(table_[i] - number * unit) <= kSameNumber * largest)) return;
    integers.entries[i] = static_cast<int8_t>(number);
  }
  integers.unit = unit;
  integers_ = integers;
}

bool CacheRows::is_coded() const {
  return codec_.kind == Kind::kLloydMax || codec_.kind == Kind::kUniform ||
         codec_.kind == Kind::kU8;
}

int CacheRows::query_width_of(const RowFormat& format) const {
  return has_integers() ? kernels_.integers->query_floats(format) : format.padded;
}

int CacheRows::sums_width_of(const RowFormat& format) const {
  return has_integers() ? kernels_.integers->sums_floats(format) : format.padded;
}

void CacheRows::prepare_part(const RowFormat& format, const float* natural,
                             float* prepared) const {
  if (has_integers()) return kernels_.integers->prepare_query(format, natural, prepared);
  to_slot_order(format, natural, prepared);
}

void CacheRows::natural_part(const RowFormat& format, const float* sums, float* natural) const {
  if (has_integers()) return kernels_.integers->natural_sums(format, sums, natural);
  to_natural_order(format, sums, natural);
}

void CacheRows::prepare_query(const float* natural, float* prepared) const {
  prepare_part(code_, natural, prepared);
  if (is_prod()) prepare_part(sign_, natural + head_size_, prepared + query_width_);
}

void CacheRows::natural_sums(const float* sums, float* natural) const {
  natural_part(code_, sums, natural);
  if (is_prod()) natural_part(sign_, sums + sums_width_, natural + head_size_);
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

void CacheRows::zeros(const uint8_t* rows, int count, const float* scales, float* out) const {
  kernels_.load_fields(rows + fields_ + 2, stride_, count, out);
  const float middle = 0.5f * static_cast<float>((1 << codec_.bits) - 1);
  for (int t = 0; t < kBlock; ++t) out[t] += scales[t] * middle;
}

std::size_t CacheRows::work_size(int queries) const {
  if (is_integer()) return static_cast<std::size_t>(queries) * kNumbersFloats;
  return slots_size(queries);
}

bool CacheRows::is_fused(int queries) const {
  // Integers of prod are never decoded: their queries lie in another order.
  if (is_prod()) return has_integers() || queries <= kMaxFusedProd;
  return queries <= (is_coded() ? kernels_.max_fused : kernels_.max_fused_bytes);
}

std::size_t CacheRows::slots_size(int queries) const {
  if (is_fused(queries)) return is_prod() ? prod_size(queries) : 0;
  const std::size_t block = static_cast<std::size_t>(kBlock) * padded_;
  return is_coded() ? block : 2 * block;
}

void CacheRows::score(const uint8_t* rows, int count, const float* query, int queries, float* work,
                      float* scores) const {
  if (is_integer()) {
    kernels_.integers->score_rows(code_, rows, count, integers_, query, queries, scores);
    return;
  }
  if (is_fused(queries)) {
    if (is_prod()) return score_prod(rows, count, query, queries, work, scores);
    if (!is_coded()) return kernels_.score_bytes(bytes_, rows, count, query, queries, scores);
    return kernels_.score_rows(code_, rows, count, table_, query, queries, scores);
  }
  if (is_coded()) {
    kernels_.decode_columns(code_, rows, count, table_, work);
  } else {
    float* const values = work + static_cast<std::size_t>(kBlock) * padded_;
    decode(rows, count, values);
    kernels_.transpose_block(values, count, padded_, work);
  }
  kernels_.multiply(query, padded_, work, kBlock, scores, kBlock, queries,
                    round_up(count, kernels_.lanes), padded_, false);
}

void CacheRows::accumulate(const uint8_t* rows, int count, const float* weights, int queries,
                           float* work, float* sums) const {
  if (is_integer()) {
    for (int r = 0; r < queries; ++r) {
      quantise(rows, count, weights + r * kBlock, work + r * kNumbersFloats,
               sums + static_cast<std::ptrdiff_t>(r) * sums_width());
    }
    return accumulate_numbers(rows, count, work, queries, sums);
  }
  if (is_fused(queries)) {
    if (is_prod()) return accumulate_prod(rows, count, weights, queries, work, sums);
    if (!is_coded()) {
      return kernels_.accumulate_bytes(bytes_, rows, count, weights, queries, sums);
    }
    return kernels_.accumulate_rows(code_, rows, count, table_, weights, queries, sums);
  }
  if (is_coded()) {
    kernels_.decode_rows(code_, rows, count, table_, work);
  } else {
    decode(rows, count, work);
    add_strange_rows(weights, queries, work, count, sums);
  }
  kernels_.multiply(weights, kBlock, work, padded_, sums, padded_, queries, padded_, count, true);
}

// ---- prod in registers
std::size_t CacheRows::prod_size(int queries) const {
  const std::size_t widest = std::max(
      {query_width_, sign_query_width_, sums_width_ + kNumbersFloats,
       sign_sums_width_ + kNumbersFloats});
  return 2 * kBlock + static_cast<std::size_t>(queries) * (kBlock + widest);
}

// What a row's numbers stand for: index * centroid, sign * (+-1).
void CacheRows::load_scales(const uint8_t* rows, int count, float* index, float* sign) const {
  kernels_.load_fields(rows + fields_, stride_, count, index);
  kernels_.load_fields(rows + fields_ + 2, stride_, count, sign);
  kernels_.scale(sign, static_cast<float>(kRootOfHalfPi / head_size_), kBlock);
}

void CacheRows::score_part(const RowFormat& format, const uint8_t* rows, int count,
                           const float* table, const IntegerTable& integers, const float* query,
                           int queries, float* scores) const {
  if (has_integers()) {
    kernels_.integers->score_rows(format, rows, count, integers, query, queries, scores);
  } else {
    kernels_.score_rows(format, rows, count, table, query, queries, scores);
  }
}

void CacheRows::score_prod(const uint8_t* rows, int count, const float* query, int queries,
                           float* work, float* scores) const {
  float* const index_scales = work;
  float* const sign_scales = index_scales + kBlock;
  float* const of_signs = sign_scales + kBlock;
  float* const part = of_signs + static_cast<std::size_t>(queries) * kBlock;
  load_scales(rows, count, index_scales, sign_scales);
  // The kernels want the rows of a part one after the other.
  const auto take_part = [&](int first, int width) {
    for (int r = 0; r < queries; ++r) {
      std::copy_n(query + r * query_width() + first, width, part + r * width);
    }
  };
  take_part(0, query_width_);
  score_part(code_, rows, count, table_, integers_, part, queries, scores);
  take_part(query_width_, sign_query_width_);
  score_part(sign_, signs(rows), count, kSigns, kIntegerSigns, part, queries, of_signs);
  for (int r = 0; r < queries; ++r) {
    float* const score = scores + r * kBlock;
    const float* const of_sign = of_signs + r * kBlock;
    for (int t = 0; t < count; ++t) {
      score[t] = score[t] * index_scales[t] + of_sign[t] * sign_scales[t];
    }
  }
}

// Sums lie from `first` on in their rows, `width` of them.
void CacheRows::accumulate_part(const RowFormat& format, const uint8_t* rows, int count,
                                const float* table, const IntegerTable& integers,
                                const float* weights, int queries, int first, int width,
                                float* work, float* sums) const {
  float* const part = work;
  float* const numbers = part + static_cast<std::size_t>(queries) * width;
  for (int r = 0; r < queries; ++r) {
    const float* const row_weights = weights + r * kBlock;
    float* const sum = part + r * width;
    std::copy_n(sums + r * sums_width() + first, width, sum);
    if (has_integers() && !kernels_.integers->quantise_weights(row_weights, count,
                                                               numbers + r * kNumbersFloats)) {
      accumulate_strange(format, rows, count, table, row_weights, sum);
    }
  }
  if (has_integers()) {
    kernels_.integers->accumulate_rows(format, rows, count, integers, numbers, queries, part);
  } else {
    kernels_.accumulate_rows(format, rows, count, table, weights, queries, part);
  }
  for (int r = 0; r < queries; ++r) {
    std::copy_n(part + r * width, width, sums + r * sums_width() + first);
  }
}

void CacheRows::accumulate_prod(const uint8_t* rows, int count, const float* weights, int queries,
                                float* work, float* sums) const {
  float* const index_scales = work;
  float* const sign_scales = index_scales + kBlock;
  float* const scaled = sign_scales + kBlock;
  float* const rest = scaled + static_cast<std::size_t>(queries) * kBlock;
  load_scales(rows, count, index_scales, sign_scales);
  const auto scale_weights = [&](const float* scales) {
    for (int r = 0; r < queries; ++r) {
      kernels_.apply_fields(weights + r * kBlock, scales, nullptr, count, scaled + r * kBlock);
    }
  };
  scale_weights(index_scales);
  accumulate_part(code_, rows, count, table_, integers_, scaled, queries, 0, sums_width_, rest,
                  sums);
  scale_weights(sign_scales);
  accumulate_part(sign_, signs(rows), count, kSigns, kIntegerSigns, scaled, queries, sums_width_,
                  sign_sums_width_, rest, sums);
}

void CacheRows::quantise(const uint8_t* rows, int count, const float* weights, float* numbers,
                         float* sum) const {
  if (!kernels_.integers->quantise_weights(weights, count, numbers)) {
    accumulate_strange(code_, rows, count, table_, weights, sum);
  }
}

void CacheRows::accumulate_numbers(const uint8_t* rows, int count, const float* numbers,
                                   int queries, float* sums) const {
  kernels_.integers->accumulate_rows(code_, rows, count, integers_, numbers, queries, sums);
}

// One query row whose weights are not all finite; a weight of zero adds nothing.
void CacheRows::accumulate_strange(const RowFormat& format, const uint8_t* rows, int count,
                                   const float* table, const float* weights, float* sum) const {
  alignas(64) float value[kMaxIntegerWidth], natural[kMaxIntegerWidth], ordered[kMaxIntegerWidth];
  const int width = kernels_.integers->sums_floats(format);
  for (int t = 0; t < count; ++t, rows += stride_) {
    kernels_.decode_rows(format, rows, 1, table, value);
    to_natural_order(format, value, natural);
    kernels_.integers->ordered_sums(format, natural, ordered);
    if (weights[t] == 0.0f) continue;
    for (int j = 0; j < width; ++j) sum[j] += weights[t] * ordered[j];
  }
}

// In a product of matrices, zero times infinity would spoil queries that do not see a row. Rows
// that are not finite are added here and left out there.
void CacheRows::add_strange_rows(const float* weights, int queries, float* values, int count,
                                 float* sums) const {
  for (int t = 0; t < count; ++t) {
    float* const value = values + static_cast<std::ptrdiff_t>(t) * padded_;
    if (is_finite(value, padded_)) continue;
    for (int r = 0; r < queries; ++r) {
      const float weight = weights[r * kBlock + t];
      if (weight == 0.0f) continue;
      float* const sum = sums + static_cast<std::ptrdiff_t>(r) * padded_;
      for (int j = 0; j < padded_; ++j) sum[j] += weight * value[j];
    }
    std::fill_n(value, padded_, 0.0f);
  }
}

// values[t][j], leading dimension padded.
void CacheRows::decode(const uint8_t* rows, int count, float* values) const {
  if (codec_.kind == Kind::kProd) return decode_prod(rows, count, values);
  for (int t = 0; t < count; ++t, rows += stride_, values += padded_) {
    decode_row(rows, values);
    std::fill(values + head_size_, values + padded_, 0.0f);
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

void CacheRows::decode_prod(const uint8_t* rows, int count, float* values) const {
  const float share = static_cast<float>(kRootOfHalfPi / head_size_);
  for (int t = 0; t < count; ++t, rows += stride_, values += padded_) {
    kernels_.decode_rows(code_, rows, 1, table_, values);
    kernels_.scale(values, half_at(rows + fields_), code_.padded);
    kernels_.decode_rows(sign_, signs(rows), 1, kSigns, values + code_.padded);
    kernels_.scale(values + code_.padded, share * half_at(rows + fields_ + 2), sign_.padded);
  }
}

}  // namespace tq
