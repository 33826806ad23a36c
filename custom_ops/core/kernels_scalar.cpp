// The scalar level: what every other level is compared with, and the fallback.
//
// Fused multiply-adds are written as std::fma where bytes depend on the rounding; the compiler may
// not contract anything else (-ffp-contract=off).
#include <cmath>
#include <cstring>
#include <limits>

#include "core/half.h"
#include "core/kernels.h"
#include "core/scalar_codes.h"

namespace tq {
namespace {

constexpr int kMaxWidth = 512;  // coordinates of a vector
constexpr float kHidden = -std::numeric_limits<float>::infinity();

void convert_from_half(const uint16_t* in, float* out, size_t count) {
  for (size_t i = 0; i < count; ++i) out[i] = half_to_float(in[i]);
}

void convert_to_half(const float* in, uint16_t* out, size_t count) {
  for (size_t i = 0; i < count; ++i) out[i] = float_to_half(in[i]);
}

bool round_to_half(const float* in, float* out, size_t count) {
  bool fits = true;
  for (size_t i = 0; i < count; ++i) {
    fits &= std::fabs(in[i]) <= 65504.0f;
    out[i] = half_to_float(float_to_half(in[i]));
  }
  return fits;
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

void rotate(const float* x, int ldx, const float* matrix, int ldm, float* y, int ldy, int rows,
            int inner, int width) {
  for (int r = 0; r < rows; ++r, x += ldx, y += ldy) {
    for (int j = 0; j < width; ++j) y[j] = 0.0f;
    for (int i = 0; i < inner; ++i) {
      const float* const row = matrix + static_cast<ptrdiff_t>(i) * ldm;
      for (int j = 0; j < width; ++j) y[j] = std::fma(x[i], row[j], y[j]);
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

int code_of(const SearchTables& tables, float y) {
  int code = 0;
  for (int i = 0; i + 1 < tables.levels; ++i) code += y >= tables.boundaries[i];
  return code;
}

float worth_of(const SearchTables& tables, const Found& found) {
  const float product = found.product > tables.least_product ? found.product : tables.least_product;
  return product * product / (found.square > kLeastSquare ? found.square : kLeastSquare);
}

Found try_gain(const SearchTables& tables, float gain, const float* y, uint8_t* codes, int size) {
  Found found{1.0f, 0.0f, 0.0f};
  for (int j = 0; j < size; ++j) {
    codes[j] = static_cast<uint8_t>(code_of(tables, gain * y[j]));
    const float c = tables.table[codes[j]];
    found.product = std::fma(c, y[j], found.product);
    found.square = std::fma(c, c, found.square);
  }
  return found;
}

// One vector and the moments of the queries; sums are in units of the table.
struct Fed {
  float v[kMaxWidth], weighted[kMaxWidth];
  float own;

  Fed(const Feedback& feedback, const float* y, int size) {
    float partial[kPartialSums] = {};
    for (int j = 0; j < size; ++j) {
      float steps = 0.0f;
      for (int i = size - 1; i > j; --i) {
        steps = std::fma(y[i], feedback.lower[static_cast<ptrdiff_t>(i) * size + j], steps);
      }
      v[j] = std::fma(feedback.steps[j], steps, y[j]);
      weighted[j] = feedback.weights[j] * v[j];
      partial[j % kPartialSums] = std::fma(weighted[j], v[j], partial[j % kPartialSums]);
    }
    own = add_partial_sums(partial);
  }

  Found attempt(const SearchTables& tables, const Feedback& feedback, float gain, uint8_t* codes,
                int size) const {
    float numbers[kMaxWidth];
    Found found{own, 0.0f, 0.0f};
    for (int j = size - 1; j >= 0; --j) {
      float steps = 0.0f;
      for (int i = size - 1; i > j; --i) {
        steps = std::fma(feedback.lower[static_cast<ptrdiff_t>(i) * size + j], numbers[i], steps);
      }
      const float step = feedback.steps[j];
      const float coded = std::fma(-(step * tables.unit), steps, gain * v[j]);
      codes[j] = static_cast<uint8_t>(code_of(tables, coded));
      numbers[j] = tables.numbers[codes[j]];
      const float q = std::fma(step, steps, numbers[j]);
      found.product = std::fma(weighted[j], q, found.product);
      found.square = std::fma(feedback.weights[j] * q, q, found.square);
    }
    return found;
  }
};

// `attempt` gives codes and what they come to.
template <class Attempt>
Found best_of(const SearchTables& tables, int size, uint8_t* codes, const Attempt& attempt) {
  uint8_t own[kMaxWidth];
  Found best{};
  float most = 0.0f;
  for (int k = 0; k < tables.count; ++k) {
    const Found found = attempt(tables.gains[k], own);
    const float worth = worth_of(tables, found);
    if (k > 0 && !(worth > most)) continue;
    best = found;
    most = worth;
    std::memcpy(codes, own, static_cast<size_t>(size));
  }
  return best;
}

void search(const SearchTables& tables, const Feedback* feedback, const float* y, int rows,
            int size, uint8_t* codes, Found* found) {
  for (int r = 0; r < rows; ++r, y += size, codes += size) {
    if (feedback == nullptr) {
      found[r] = best_of(tables, size, codes, [&](float gain, uint8_t* own) {
        return try_gain(tables, gain, y, own, size);
      });
      continue;
    }
    const Fed fed(feedback[r], y, size);
    found[r] = best_of(tables, size, codes, [&](float gain, uint8_t* own) {
      return fed.attempt(tables, feedback[r], gain, own, size);
    });
    found[r].product *= tables.unit;
    found[r].square *= tables.unit * tables.unit;
  }
}

void round_steps(const float* x, float zero, float scale, float low, float high, uint8_t* codes,
                 int size) {
  for (int j = 0; j < size; ++j) {
    const float step = std::nearbyint((x[j] - zero) / scale);
    codes[j] = static_cast<uint8_t>(static_cast<int>(step < low ? low : step > high ? high : step));
  }
}

// Below 2^-6 the steps are 2^-9, the last place of numbers around 2^14.
constexpr float kFp8Subnormal = 0.015625f, kFp8Magic = 16384.0f;

void encode_fp8(const float* x, uint8_t* codes, int size) {
  for (int j = 0; j < size; ++j) {
    const uint32_t sign = float_to_bits(x[j]) >> 24 & 0x80u;
    const float magnitude = std::fabs(x[j]) <= 448.0f ? std::fabs(x[j]) : 448.0f;
    const uint32_t bits = float_to_bits(magnitude);
    // From exponent bias 127 to 7.
    const uint32_t code = magnitude <= kFp8Subnormal
                              ? float_to_bits(magnitude + kFp8Magic) - float_to_bits(kFp8Magic)
                              : ((bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20) - (120u << 3);
    codes[j] = static_cast<uint8_t>(code | sign);
  }
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

void load_fields(const uint8_t* at, int stride, int count, float* out) {
  for (int t = 0; t < count; ++t) {
    uint16_t half;
    std::memcpy(&half, at + static_cast<ptrdiff_t>(t) * stride, sizeof half);
    out[t] = half_to_float(half);
  }
  for (int t = count; t < kBlock; ++t) out[t] = 0.0f;
}

void load_field_pairs(const uint8_t* at, int stride, int count, float* first, float* second) {
  load_fields(at, stride, count, first);
  load_fields(at + sizeof(uint16_t), stride, count, second);
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
    decode_row(format, rows + static_cast<ptrdiff_t>(t) * format.stride, table, key);
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
    decode_row(format, rows + static_cast<ptrdiff_t>(t) * format.stride, table, value);
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
    const uint8_t* const row = rows + static_cast<ptrdiff_t>(t) * format.stride;
    for (int j = 0; j < format.head_size; ++j) {
      keys[static_cast<ptrdiff_t>(j) * kBlock + t] = table[code_at(format, row, j)];
    }
  }
}

void decode_rows(const RowFormat& format, const uint8_t* rows, int count, const float* table,
                 float* values) {
  for (int t = 0; t < count; ++t) {
    decode_row(format, rows + static_cast<ptrdiff_t>(t) * format.stride, table,
               values + static_cast<ptrdiff_t>(t) * format.padded);
  }
}

void decode_fp8(const uint8_t* codes, float* out, int size) {
  for (int j = 0; j < size; ++j) {
    const uint32_t magnitude = codes[j] & 0x7fu;
    float value = bits_to_float((magnitude << 20) + (120u << 23));
    if (magnitude < 8) value = bits_to_float((magnitude << 20) + (121u << 23)) - kFp8Subnormal;
    if (magnitude == 0x7f) value = 0.0f;  // NaN, which nobody writes
    out[j] = codes[j] & 0x80u ? -value : value;
  }
}

void decode_int8(const uint8_t* codes, float scale, float* out, int size) {
  for (int j = 0; j < size; ++j) {
    out[j] = static_cast<float>(static_cast<int8_t>(codes[j])) * scale;
  }
}

void decode_bytes(const ByteFormat& format, const uint8_t* row, float* out) {
  for (int j = 0; j < format.head_size; ++j) {
    uint16_t half;
    switch (format.kind) {
      case Coordinate::kFp8:
        decode_fp8(row + j, out + j, 1);
        break;
      case Coordinate::kInt8:
        std::memcpy(&half, row + format.scales + j / kScaleBlock * 2, sizeof half);
        decode_int8(row + j, half_to_float(half), out + j, 1);
        break;
      case Coordinate::kFloat:
        std::memcpy(out + j, row + 4 * j, sizeof *out);
        break;
      default:
        std::memcpy(&half, row + 2 * j, sizeof half);
        out[j] = format.kind == Coordinate::kHalf ? half_to_float(half) : bfloat_to_float(half);
    }
  }
}

void score_bytes(const ByteFormat& format, const uint8_t* rows, int count, const float* query,
                 int queries, float* scores) {
  float key[kMaxHeadSize];
  for (int t = 0; t < count; ++t) {
    decode_bytes(format, rows + static_cast<ptrdiff_t>(t) * format.stride, key);
    for (int r = 0; r < queries; ++r) {
      const float* const q = query + static_cast<ptrdiff_t>(r) * format.padded;
      float partial[kPartialSums] = {};
      for (int j = 0; j < format.head_size; ++j) partial[j % kPartialSums] += q[j] * key[j];
      scores[r * kBlock + t] = add_partial_sums(partial);
    }
  }
}

void accumulate_bytes(const ByteFormat& format, const uint8_t* rows, int count,
                      const float* weights, int queries, float* sums) {
  float value[kMaxHeadSize];
  for (int t = 0; t < count; ++t) {
    decode_bytes(format, rows + static_cast<ptrdiff_t>(t) * format.stride, value);
    for (int r = 0; r < queries; ++r) {
      float* const sum = sums + static_cast<ptrdiff_t>(r) * format.padded;
      const float weight = weights[r * kBlock + t];
      if (weight == 0.0f) continue;
      for (int j = 0; j < format.head_size; ++j) sum[j] += weight * value[j];
    }
  }
}

float apply_fields(const float* weights, const float* scales, const float* zeros, int count,
                   float* out) {
  float sum = 0.0f;
  for (int t = 0; t < count; ++t) {
    const float weight = weights[t];
    out[t] = weight == 0.0f ? 0.0f : weight * scales[t];
    if (zeros != nullptr && weight != 0.0f) sum += weight * zeros[t];
  }
  return sum;
}

void transpose_block(const float* rows, int count, int width, float* columns) {
  for (int t = 0; t < count; ++t) {
    for (int j = 0; j < width; ++j) {
      columns[static_cast<ptrdiff_t>(j) * kBlock + t] = rows[static_cast<ptrdiff_t>(t) * width + j];
    }
  }
}

float finish_scores(float* scores, const float* key_scales, const float* shift, const float* bias,
                    float hide, float softcap, int count, int low, int high) {
  float max = kHidden;
  for (int t = 0; t < count; ++t) {
    if (t < low || t >= high || (bias != nullptr && bias[t] <= hide)) {
      scores[t] = kHidden;
      continue;
    }
    float score = scores[t] * key_scales[t];
    if (shift != nullptr) score += shift[t];
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

void add_scaled(float* x, const float* by, const float* other, const float* other_by, int count) {
  for (int t = 0; t < count; ++t) x[t] = x[t] * by[t] + other[t] * other_by[t];
}

// half[u] += the waves of pairs [width] of a block, cosines or sines.
void add_waves(const RotaryBlock& block, const RotaryBasis& basis, const float* pairs,
               float* half) {
  for (int k = 0; k < basis.rank + block.fast; ++k) {
    float sum = k < basis.rank ? 0.0f : pairs[block.slow + k - basis.rank];
    for (int i = 0; k < basis.rank && i < block.slow; ++i) {
      sum += pairs[i] * basis.weights[k * block.width + i];
    }
    for (int u = 0; u < kBlock / 2; ++u) half[u] += sum * basis.vectors[k * (kBlock / 2) + u];
  }
}

void add_rotary(const RotaryBlock& block, const float* angles, const float* pairs, ptrdiff_t pitch,
                int rows, const float* key_scales, float* scores, PrefetchRange) {
  constexpr int kHalf = kBlock / 2;
  const int width = block.width;
  const float *const cosines = angles, *const sines = angles + width;
  for (int r = 0; r < rows; ++r, pairs += pitch, scores += kBlock) {
    float turned[2 * kMaxFrequencies], even[kHalf] = {}, odd[kHalf] = {};
    for (int i = 0; i < width; ++i) {
      const float a = pairs[i], b = pairs[width + i];
      turned[i] = a * cosines[i] + b * sines[i];
      turned[width + i] = b * cosines[i] - a * sines[i];
    }
    add_waves(block, block.basis[0], turned, even);
    add_waves(block, block.basis[1], turned + width, odd);
    for (int u = 0; u < kHalf; ++u) {
      const int later = kHalf + u, sooner = kHalf - 1 - u;
      scores[later] = scores[later] * key_scales[later] + (even[u] + odd[u]);
      scores[sooner] = scores[sooner] * key_scales[sooner] + (even[u] - odd[u]);
    }
  }
}

constexpr Kernels make_kernels() {
  Kernels all{};
  all.name = "scalar";
  all.lanes = 1;
  all.max_fused = std::numeric_limits<int>::max();
  all.half_to_float = convert_from_half;
  all.float_to_half = convert_to_half;
  all.round_to_half = round_to_half;
  all.sum_squares = sum_squares;
  all.divide = divide;
  all.rotate = rotate;
  all.quantise = quantise;
  all.search = search;
  all.round_steps = round_steps;
  all.encode_fp8 = encode_fp8;
  all.multiply = multiply;
  all.load_fields = load_fields;
  all.load_field_pairs = load_field_pairs;
  all.score_rows = score_rows;
  all.accumulate_rows = accumulate_rows;
  all.decode_columns = decode_columns;
  all.decode_rows = decode_rows;
  all.decode_fp8 = decode_fp8;
  all.decode_int8 = decode_int8;
  all.transpose_block = transpose_block;
  all.finish_scores = finish_scores;
  all.weigh = weigh;
  all.scale = scale;
  all.add_scaled = add_scaled;
  all.add_rotary = add_rotary;
  all.max_fused_bytes = std::numeric_limits<int>::max();
  all.score_bytes = score_bytes;
  all.accumulate_bytes = accumulate_bytes;
  all.apply_fields = apply_fields;
  return all;
}

constexpr Kernels kKernels = make_kernels();

}  // namespace

const Kernels* scalar_kernels() { return &kKernels; }

}  // namespace tq
