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

constexpr float kSigns[kTable] = {-1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1,
                                  -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1};

}  // namespace

CacheRows::CacheRows(const Kernels& kernels, const CacheView& cache, Element element, int head_size)
    : kernels_(kernels),
      codec_(cache.codec),
      element_(raw_element(element, cache.codec.bits)),
      head_size_(head_size),
      rows_(cache.rows),
      stride_(cache.stride),
      fields_(spec::code_bytes(cache.codec, head_size)),
      code_(row_format(bits_of_index(cache.codec), head_size, kernels.lanes, cache.stride)),
      sign_(row_format(1, head_size, kernels.lanes, cache.stride)),
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
}

bool CacheRows::is_coded() const {
  return codec_.kind == Kind::kLloydMax || codec_.kind == Kind::kUniform ||
         codec_.kind == Kind::kU8;
}

void CacheRows::to_slots(const float* natural, float* slotted) const {
  to_slot_order(code_, natural, slotted);
  if (codec_.kind == Kind::kProd) {
    to_slot_order(sign_, natural + head_size_, slotted + code_.padded);
  }
}

void CacheRows::to_natural(const float* slotted, float* natural) const {
  to_natural_order(code_, slotted, natural);
  if (codec_.kind == Kind::kProd) {
    to_natural_order(sign_, slotted + code_.padded, natural + head_size_);
  }
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
  if (is_fused(queries)) return 0;
  const std::size_t block = static_cast<std::size_t>(kBlock) * padded_;
  return is_coded() ? block : 2 * block;
}

void CacheRows::score(const uint8_t* rows, int count, const float* query, int queries, float* work,
                      float* scores) const {
  if (is_fused(queries)) {
    kernels_.score_rows(code_, rows, count, table_, query, queries, scores);
    return;
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
  if (is_fused(queries)) {
    kernels_.accumulate_rows(code_, rows, count, table_, weights, queries, sums);
    return;
  }
  if (is_coded()) {
    kernels_.decode_rows(code_, rows, count, table_, work);
  } else {
    decode(rows, count, work);
    add_strange_rows(weights, queries, work, count, sums);
  }
  kernels_.multiply(weights, kBlock, work, padded_, sums, padded_, queries, padded_, count, true);
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
  // Signs lie in the last plane.
  const int plane = spec::planes(codec_).count - 1;
  const int signs = spec::plane_offset(codec_, plane, head_size_);
  const float share = static_cast<float>(kRootOfHalfPi / head_size_);
  for (int t = 0; t < count; ++t, rows += stride_, values += padded_) {
    kernels_.decode_rows(code_, rows, 1, table_, values);
    kernels_.scale(values, half_at(rows + fields_), code_.padded);
    kernels_.decode_rows(sign_, rows + signs, 1, kSigns, values + code_.padded);
    kernels_.scale(values + code_.padded, share * half_at(rows + fields_ + 2), sign_.padded);
  }
}

}  // namespace tq
