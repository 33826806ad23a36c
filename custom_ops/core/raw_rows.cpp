// Plain loops over elements; the contract is in raw_rows.h.
#include "core/raw_rows.h"

#include <algorithm>
#include <cstring>

#include "tq/codec_spec.h"

namespace tq {
namespace {

// A cache may lie at any address, the conversions want whole elements.
void load_row(const Kernels& kernels, const RowFormat& format, Element element, const uint8_t* row,
              float* out) {
  alignas(64) uint16_t aligned[spec::kMaxHeadSize * sizeof(float) / sizeof(uint16_t)];
  std::memcpy(aligned, row, static_cast<std::size_t>(format.row_bytes));
  load_floats(kernels, element, aligned, 0, out, static_cast<std::size_t>(format.head_size));
}

bool is_finite(const float* x, int size) {
  constexpr uint32_t kExponent = 0x7f800000u;
  bool finite = true;
  for (int j = 0; j < size; ++j) finite &= (float_to_bits(x[j]) & kExponent) != kExponent;
  return finite;
}

}  // namespace

void decode_raw_columns(const Kernels& kernels, const RowFormat& format, Element element,
                        const uint8_t* rows, int count, float* keys) {
  alignas(64) float key[spec::kMaxHeadSize];
  std::fill_n(keys, static_cast<std::size_t>(format.padded) * kBlock, 0.0f);
  for (int t = 0; t < count; ++t, rows += format.row_bytes) {
    load_row(kernels, format, element, rows, key);
    for (int j = 0; j < format.head_size; ++j) keys[j * kBlock + t] = key[j];
  }
}

void decode_raw_rows(const Kernels& kernels, const RowFormat& format, Element element,
                     const uint8_t* rows, int count, float* values) {
  for (int t = 0; t < count; ++t, rows += format.row_bytes, values += format.padded) {
    load_row(kernels, format, element, rows, values);
    std::fill(values + format.head_size, values + format.padded, 0.0f);
  }
}

void accumulate_raw_rows(const Kernels& kernels, const RowFormat& format, const float* weights,
                         int queries, float* values, int count, float* sums) {
  for (int t = 0; t < count; ++t) {
    float* const value = values + static_cast<std::ptrdiff_t>(t) * format.padded;
    if (is_finite(value, format.head_size)) continue;
    // In a product of matrices, zero times infinity would spoil queries that do not see this row.
    for (int r = 0; r < queries; ++r) {
      const float weight = weights[r * kBlock + t];
      if (weight == 0.0f) continue;
      float* const sum = sums + static_cast<std::ptrdiff_t>(r) * format.padded;
      for (int j = 0; j < format.head_size; ++j) sum[j] += weight * value[j];
    }
    std::fill_n(value, format.head_size, 0.0f);
  }
  kernels.multiply(weights, kBlock, values, format.padded, sums, format.padded, queries,
                   format.padded, count, true);
}

}  // namespace tq
