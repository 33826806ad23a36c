// Integer products of 8 bits in portable C++: what every other level is compared with, with the steps
// of those that add in 32 bits or of those that have lanes (core/lane_sums.h). Queries and sums lie in
// their natural order.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/kernels.h"
#include "core/lane_sums.h"
#include "core/scalar_codes.h"

namespace tq {
namespace {

constexpr int kMaxHeadSize = 512;
constexpr int kMaxQueries = 8;  // query rows that share the decoded codes
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A prepared query row: int8_t [head_size], padded to whole floats, then the value of a step.
int whole_floats(int bytes) { return (bytes + 3) / 4; }
int query_floats(const RowFormat& format) { return whole_floats(format.head_size) + 1; }
int sums_floats(const RowFormat& format) { return format.head_size; }

// What numbers are multiplied with before they are rounded. Below this a step has no inverse; such
// numbers are zeros beside anything.
float inverse_step(float most, float steps) { return most > 1e-30f ? steps / most : 0.0f; }

// Rows whose weights share a step.
template <bool LANES>
constexpr int kStepRows = LANES ? kLaneStepRows : kByteStepRows;

// The largest sum of one sign of the coordinates of a lane: two neighbours of a slot, or of two slots
// that the level takes one after the other.
float largest_lane(const RowFormat& format, const IntegerTable& table, const float* natural) {
  const bool of_two = format.slots > 1 && lane_vectors(table.largest) == 2;
  const int pairs = of_two ? format.slots / 2 : format.slots;
  float most = 0.0f;
  for (int p = 0; p < pairs; ++p) {
    const int first = of_two && format.bits != 5 ? 2 * p : p;
    const int second = format.bits == 5 ? p + 4 : first + 1;
    for (const float sign : {1.0f, -1.0f}) {
      const auto one = [&](int slot, int i) {
        const int j = slot * format.slot_size + i;
        const bool is_in = i < format.slot_size && j < format.head_size;
        return is_in ? std::max(sign * natural[j], 0.0f) : 0.0f;
      };
      for (int i = 0; i < format.slot_size; i += 2) {
        float sum = one(first, i) + one(first, i + 1);
        if (of_two) sum += one(second, i) + one(second, i + 1);
        most = std::max(most, sum);
      }
    }
  }
  return most;
}

// What is not finite becomes zeros with a step that is not a number.
template <bool LANES>
void prepare_query(const RowFormat& format, const IntegerTable& table, const float* natural,
                   float* prepared) {
  float most = 0.0f;
  bool finite = true;
  for (int j = 0; j < format.head_size; ++j) {
    finite = finite && std::isfinite(natural[j]);
    most = std::max(most, std::fabs(natural[j]));
  }
  if (LANES && finite) {
    most =
        std::max(most, largest_lane(format, table, natural) * lane_share_of_query(table.largest));
  }
  const float inverse = finite ? inverse_step(most, kLargestByte) : 0.0f;
  int8_t* const operands = reinterpret_cast<int8_t*>(prepared);
  for (int j = 0; j < format.head_size; ++j) {
    operands[j] = finite ? static_cast<int8_t>(std::nearbyint(natural[j] * inverse)) : int8_t{0};
  }
  prepared[whole_floats(format.head_size)] = finite ? most / kLargestByte : kNan;
}

void decode_row(const RowFormat& format, const uint8_t* row, const IntegerTable& table,
                int* operands) {
  for (int j = 0; j < format.head_size; ++j) {
    operands[j] = table.entries[code_at(format, row, j)];
  }
}

void score_rows(const RowFormat& format, const uint8_t* rows, int count, const IntegerTable& table,
                const float* prepared, int pitch, int queries, float* scores, PrefetchRange) {
  int key[kMaxHeadSize];
  for (int t = 0; t < count; ++t) {
    decode_row(format, rows + static_cast<ptrdiff_t>(t) * format.stride, table, key);
    for (int r = 0; r < queries; ++r) {
      const float* const row = prepared + static_cast<ptrdiff_t>(r) * pitch;
      const int8_t* const query = reinterpret_cast<const int8_t*>(row);
      int32_t sum = 0;
      for (int j = 0; j < format.head_size; ++j) sum += query[j] * key[j];
      const float step = row[whole_floats(format.head_size)] * table.unit;
      scores[r * kBlock + t] = static_cast<float>(sum) * step;
    }
  }
}

// The largest sum of the weights of a lane: two neighbours of four, or of two fours.
float largest_lane_of_weights(const float* weights, int largest) {
  float most = 0.0f;
  for (int t = 0; t < kLaneStepRows; t += 2) {
    if (lane_vectors(largest) == 1) {
      most = std::max(most, weights[t] + weights[t + 1]);
    } else if (t % 8 < 4) {
      const float *one = weights + t, *other = one + 4;
      most = std::max(most, (one[0] + other[0]) + (one[1] + other[1]));
    }
  }
  return most;
}

// A row of a block of weights: uint8_t [kBlock], then the values of the steps.
template <bool LANES>
void store_operands(const float* weights, int largest, float* operands) {
  constexpr int kRows = kStepRows<LANES>;
  uint8_t* const out = reinterpret_cast<uint8_t*>(operands);
  for (int step = 0; step < kBlock / kRows; ++step) {
    const float* const some = weights + step * kRows;
    float most = *std::max_element(some, some + kRows);
    if (LANES) {
      most =
          std::max(most, largest_lane_of_weights(some, largest) * lane_share_of_weights(largest));
    }
    const float inverse = inverse_step(most, kLargestByteWeight);
    for (int t = 0; t < kRows; ++t) {
      out[step * kRows + t] = static_cast<uint8_t>(std::nearbyint(some[t] * inverse));
    }
    operands[kBlock / 4 + step] = most / kLargestByteWeight;
  }
}

bool are_weights(const float* weights) {
  return std::all_of(weights, weights + kBlock, [](float x) { return x >= 0.0f && x < kInfinity; });
}

template <bool LANES>
bool quantise_weights(const float* weights, int count, int largest, float* operands) {
  float all[kBlock] = {};
  std::copy_n(weights, count, all);
  const bool are_good = are_weights(all);
  if (!are_good) std::fill_n(all, kBlock, 0.0f);
  store_operands<LANES>(all, largest, operands);
  return are_good;
}

// The steps of vec_int_avx2.h's function of that name, so that weights are rounded alike.
float exponential(float x) {
  const float scaled = x * 1.44269504f;
  const float y = scaled < -200.0f ? -200.0f : scaled;  // NaN passes
  const float n = std::nearbyint(y), f = y - n;
  float p = 1.3333558e-3f;
  for (const float next : {9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f}) {
    p = std::fma(p, f, next);
  }
  return std::isnan(p) ? p : std::ldexp(p, static_cast<int>(n));
}

template <bool LANES>
float softmax_row(const float* scores, const float* key_scales, const PartScales& value_scales,
                  float* maximum, float* operands) {
  float x[kBlock], scaled[kMaxParts * kBlock];
  float max = *maximum;
  for (int t = 0; t < kBlock; ++t) {
    x[t] = scores[t] * key_scales[t];
    if (x[t] > max) max = x[t];
  }
  if (!std::isfinite(max)) return kNan;
  float sum = 0.0f;
  for (int t = 0; t < kBlock; ++t) {
    const float weight = exponential(x[t] - max);
    sum += weight;
    for (int p = 0; p < value_scales.parts; ++p) {
      scaled[p * kBlock + t] = weight * value_scales.scales[p * kBlock + t];
    }
  }
  bool are_good = sum < kInfinity;
  for (int p = 0; p < value_scales.parts; ++p) {
    are_good = are_good && are_weights(scaled + p * kBlock);
  }
  if (!are_good) return kNan;
  for (int p = 0; p < value_scales.parts; ++p) {
    store_operands<LANES>(scaled + p * kBlock, value_scales.largest[p],
                          operands + p * value_scales.pitch);
  }
  *maximum = max;
  return sum;
}

template <bool LANES>
void softmax_block(const float* scores, int rows, const float* key_scales,
                   const PartScales& value_scales, float* maxima, float* exponentials,
                   float* operands, PrefetchRange) {
  for (int r = 0; r < rows; ++r) {
    exponentials[r] = softmax_row<LANES>(scores + r * kBlock, key_scales, value_scales, maxima + r,
                                         operands + r * kOperandFloats);
  }
}

template <bool LANES>
float softmax_block_zeros(const float* scores, const float* key_scales, const float* key_zeros,
                          float query_sum, const PartScales& value_scales, const float* value_zeros,
                          float* maximum, float* operands, float* zeros) {
  float x[kBlock];
  float max = *maximum;
  for (int t = 0; t < kBlock; ++t) {
    x[t] = std::fma(query_sum, key_zeros[t], scores[t] * key_scales[t]);
    if (x[t] > max) max = x[t];
  }
  if (!std::isfinite(max)) return kNan;
  float sum = 0.0f, of_zeros = 0.0f;
  for (int t = 0; t < kBlock; ++t) {
    const float weight = exponential(x[t] - max);
    sum += weight;
    of_zeros = std::fma(weight, value_zeros[t], of_zeros);
    x[t] = weight * value_scales.scales[t];
  }
  if (!(sum < kInfinity) || !std::isfinite(of_zeros) || !are_weights(x)) return kNan;
  store_operands<LANES>(x, *value_scales.largest, operands);
  *maximum = max;
  *zeros = of_zeros;
  return sum;
}

bool any_reaches(const float* scores, int rows, const float* key_scales, const float* limits) {
  for (int r = 0; r < rows; ++r) {
    for (int t = 0; t < kBlock; ++t) {
      if (!(scores[r * kBlock + t] * key_scales[t] < limits[r])) return true;
    }
  }
  return false;
}

// Of up to kMaxQueries query rows.
template <bool LANES>
void accumulate_some(const RowFormat& format, const uint8_t* rows, int count,
                     const IntegerTable& table, const float* operands, int queries, float* sums,
                     int pitch) {
  int value[kMaxHeadSize];
  int32_t totals[kMaxQueries * kMaxHeadSize];
  for (int from = 0; from < count; from += kStepRows<LANES>) {
    std::fill_n(totals, queries * format.head_size, 0);
    for (int t = from; t < std::min(count, from + kStepRows<LANES>); ++t) {
      decode_row(format, rows + static_cast<ptrdiff_t>(t) * format.stride, table, value);
      for (int r = 0; r < queries; ++r) {
        const int weight = reinterpret_cast<const uint8_t*>(operands + r * kOperandFloats)[t];
        int32_t* const total = totals + r * format.head_size;
        for (int j = 0; j < format.head_size; ++j) total[j] += weight * value[j];
      }
    }
    for (int r = 0; r < queries; ++r) {
      const float step = operands[r * kOperandFloats + kBlock / 4 + from / kStepRows<LANES>];
      const float by = step * table.unit;
      float* const sum = sums + r * pitch;
      for (int j = 0; j < format.head_size; ++j) {
        sum[j] = std::fma(static_cast<float>(totals[r * format.head_size + j]), by, sum[j]);
      }
    }
  }
}

template <bool LANES>
void accumulate_rows(const RowFormat& format, const uint8_t* rows, int count,
                     const IntegerTable& table, const float* operands, int queries, float* sums,
                     int pitch, PrefetchRange) {
  for (int first = 0; first < queries; first += kMaxQueries) {
    accumulate_some<LANES>(format, rows, count, table, operands + first * kOperandFloats,
                           std::min(kMaxQueries, queries - first), sums + first * pitch, pitch);
  }
}

void copy_sums(const RowFormat& format, const float* from, float* to) {
  std::copy_n(from, format.head_size, to);
}

template <bool LANES>
constexpr IntegerKernels make_integer_kernels() {
  IntegerKernels all{};
  all.has_lanes = LANES;
  all.query_floats = query_floats;
  all.sums_floats = sums_floats;
  all.prepare_query = prepare_query<LANES>;
  all.score_rows = score_rows;
  all.quantise_weights = quantise_weights<LANES>;
  all.softmax_block = softmax_block<LANES>;
  all.softmax_block_zeros = softmax_block_zeros<LANES>;
  all.any_reaches = any_reaches;
  all.accumulate_rows = accumulate_rows<LANES>;
  all.natural_sums = copy_sums;
  all.ordered_sums = copy_sums;
  return all;
}

constexpr IntegerKernels kIntegerKernels = make_integer_kernels<false>();
constexpr IntegerKernels kLaneKernels = make_integer_kernels<true>();

}  // namespace

const IntegerKernels* scalar_integers() { return &kIntegerKernels; }
const IntegerKernels* scalar_lane_integers() { return &kLaneKernels; }

}  // namespace tq
