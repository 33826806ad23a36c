// The scalar level: what every other level is compared with, and the fallback.
//
// Fused multiply-adds are written as std::fma where bytes depend on the rounding; the compiler may
// not contract anything else (-ffp-contract=off).
#include <cmath>
#include <cstring>
#include <limits>

#include "core/half.h"
#include "core/kernels.h"

namespace tq {
namespace {

constexpr float kHidden = -std::numeric_limits<float>::infinity();

void convert_from_half(const uint16_t* in, float* out, size_t count) {
  for (size_t i = 0; i < count; ++i) out[i] = half_to_float(in[i]);
}

void convert_to_half(const float* in, uint16_t* out, size_t count) {
  for (size_t i = 0; i < count; ++i) out[i] = float_to_half(in[i]);
}

float add_partial_sums(float* partial) {
  for (int half = kPartialSums / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) partial[i] += partial[i + half];
  }
  return partial[0];
}

float sum_squares(const float* x, int size) {
  float partial[kPartialSums] = {};
  for (int i = 0; i < size; ++i) {
    partial[i % kPartialSums] = std::fma(x[i], x[i], partial[i % kPartialSums]);
  }
  return add_partial_sums(partial);
}

void divide(const float* x, float divisor, float* out, int size) {
  for (int i = 0; i < size; ++i) out[i] = x[i] / divisor;
}

void rotate(const float* x, const float* rotation, float* y, int rows, int head_size) {
  for (int r = 0; r < rows; ++r, x += head_size, y += head_size) {
    for (int j = 0; j < head_size; ++j) y[j] = 0.0f;
    for (int i = 0; i < head_size; ++i) {
      for (int j = 0; j < head_size; ++j) y[j] = std::fma(x[i], rotation[i * head_size + j], y[j]);
    }
  }
}

float quantise(const float* y, const float* boundaries, int levels, const float* table,
               uint8_t* codes, int size) {
  float partial[kPartialSums] = {};
  for (int j = 0; j < size; ++j) {
    int code = 0;
    for (int i = 0; i + 1 < levels; ++i) code += y[j] >= boundaries[i];
    codes[j] = static_cast<uint8_t>(code);
    partial[j % kPartialSums] = std::fma(table[code], table[code], partial[j % kPartialSums]);
  }
  return add_partial_sums(partial);
}

void multiply(const float* a, int lda, const float* b, int ldb, float* c, int ldc, int m, int n,
              int k, bool accumulate) {
  for (int row = 0; row < m; ++row, a += lda, c += ldc) {
    if (!accumulate) {
      for (int j = 0; j < n; ++j) c[j] = 0.0f;
    }
    for (int i = 0; i < k; ++i) {
      const float* const b_row = b + static_cast<ptrdiff_t>(i) * ldb;
      for (int j = 0; j < n; ++j) c[j] += a[i] * b_row[j];
    }
  }
}

void row_scales(const RowFormat& format, const uint8_t* rows, int count, float* scales) {
  for (int t = 0; t < count; ++t) {
    uint16_t half;
    std::memcpy(&half, rows + static_cast<ptrdiff_t>(t) * format.row_bytes + format.scale_offset,
                sizeof half);
    scales[t] = half_to_float(half);
  }
  for (int t = count; t < kBlock; ++t) scales[t] = 0.0f;
}

int code_at(const RowFormat& format, const uint8_t* row, int j) {
  const int n = format.slot_size;
  switch (format.bits) {
    case 4:
      return (row[j % n] >> (4 * (j / n))) & 15;
    case 2:
      return (row[j % n] >> (2 * (j / n))) & 3;
    default: {
      const int low = (row[j % (2 * n)] >> (2 * (j / (2 * n)))) & 3;
      const int high = (row[format.high_plane + j % n] >> (j / n)) & 1;
      return low | high << 2;
    }
  }
}

void decode_row(const RowFormat& format, const uint8_t* row, const float* table, float* out) {
  for (int j = 0; j < format.head_size; ++j) out[j] = table[code_at(format, row, j)];
}

constexpr int kMaxHeadSize = 512;

// Without lanes there is no padding: slot order is the natural order.
void score_rows(const RowFormat& format, const uint8_t* rows, int count, const float* table,
                const float* query, int queries, float* scores) {
  float key[kMaxHeadSize];
  for (int t = 0; t < count; ++t) {
    decode_row(format, rows + static_cast<ptrdiff_t>(t) * format.row_bytes, table, key);
    for (int r = 0; r < queries; ++r) {
      const float* const q = query + static_cast<ptrdiff_t>(r) * format.padded;
      float partial[kPartialSums] = {};
      for (int j = 0; j < format.head_size; ++j) partial[j % kPartialSums] += q[j] * key[j];
      scores[r * kBlock + t] = add_partial_sums(partial);
    }
  }
}

void accumulate_rows(const RowFormat& format, const uint8_t* rows, int count, const float* table,
                     const float* weights, int queries, float* sums) {
  float value[kMaxHeadSize];
  for (int t = 0; t < count; ++t) {
    decode_row(format, rows + static_cast<ptrdiff_t>(t) * format.row_bytes, table, value);
    for (int r = 0; r < queries; ++r) {
      float* const sum = sums + static_cast<ptrdiff_t>(r) * format.padded;
      const float weight = weights[r * kBlock + t];
      for (int j = 0; j < format.head_size; ++j) sum[j] += weight * value[j];
    }
  }
}

void decode_columns(const RowFormat& format, const uint8_t* rows, int count, const float* table,
                    float* keys) {
  for (int t = 0; t < count; ++t) {
    const uint8_t* const row = rows + static_cast<ptrdiff_t>(t) * format.row_bytes;
    for (int j = 0; j < format.head_size; ++j) {
      keys[static_cast<ptrdiff_t>(j) * kBlock + t] = table[code_at(format, row, j)];
    }
  }
}

void decode_rows(const RowFormat& format, const uint8_t* rows, int count, const float* table,
                 float* values) {
  for (int t = 0; t < count; ++t) {
    decode_row(format, rows + static_cast<ptrdiff_t>(t) * format.row_bytes, table,
               values + static_cast<ptrdiff_t>(t) * format.padded);
  }
}

float finish_scores(float* scores, const float* key_scales, const float* bias, float hide,
                    float softcap, int count, int low, int high) {
  float max = kHidden;
  for (int t = 0; t < count; ++t) {
    if (t < low || t >= high || (bias != nullptr && bias[t] <= hide)) {
      scores[t] = kHidden;
      continue;
    }
    float score = scores[t] * key_scales[t];
    if (softcap > 0.0f) score = softcap * std::tanh(score / softcap);
    if (bias != nullptr) score += bias[t];
    scores[t] = score;
    if (score > max) max = score;
  }
  return max;
}

float weigh(float* scores, const float* value_scales, int count, float max) {
  float sum = 0.0f;
  for (int t = 0; t < count; ++t) {
    if (scores[t] == kHidden) {
      scores[t] = 0.0f;
      continue;
    }
    const float weight = std::exp(scores[t] - max);
    sum += weight;
    scores[t] = weight * value_scales[t];
  }
  return sum;
}

void scale(float* x, float factor, int size) {
  for (int i = 0; i < size; ++i) x[i] *= factor;
}

constexpr Kernels kKernels = {
    "scalar",        1,           std::numeric_limits<int>::max(),
    convert_from_half, convert_to_half, sum_squares,
    divide,          rotate,      quantise,
    multiply,        row_scales,  score_rows,
    accumulate_rows, decode_columns, decode_rows,
    finish_scores,   weigh,       scale,
};

}  // namespace

const Kernels* scalar_kernels() { return &kKernels; }

}  // namespace tq
