// The kernels in terms of the lanes of one vec_*.h. Included once per instruction set, by a file
// that includes its vec_*.h first and defines TQ_LEVEL, the level's name.
//
// No STL, no ORT, no inline function with external linkage (see core/kernels.h). Rows are never
// read beyond their own bytes: the last row of a cache may end at the end of its memory.

#include "core/kernels.h"

namespace {

using tq::kBlock;
using tq::kPartialSums;
using tq::RowFormat;

TQ_INLINE int smaller(int a, int b) { return a < b ? a : b; }

// ---- conversions
void half_to_float(const uint16_t* in, float* out, size_t count) {
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(out + i, load_half(in + i));
  if (i < count) {
    uint16_t rest[kLanes] = {};
    float wide[kLanes];
    const size_t some = count - i;
    for (size_t j = 0; j < some; ++j) rest[j] = in[i + j];
    store(wide, load_half(rest));
    for (size_t j = 0; j < some; ++j) out[i + j] = wide[j];
  }
}

void float_to_half(const float* in, uint16_t* out, size_t count) {
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store_half(out + i, load(in + i));
  if (i < count) {
    float rest[kLanes] = {};
    uint16_t narrow[kLanes];
    const size_t some = count - i;
    for (size_t j = 0; j < some; ++j) rest[j] = in[i + j];
    store_half(narrow, load(rest));
    for (size_t j = 0; j < some; ++j) out[i + j] = narrow[j];
  }
}

// ---- encode
constexpr int kPartialVectors = kPartialSums / kLanes;

TQ_INLINE V load_up_to(const float* p, int n) { return n >= kLanes ? load(p) : load_n(p, n); }

// The tree of the scalar level.
TQ_INLINE float add_partial_sums(const V* sums) {
  float partial[kPartialSums];
  for (int v = 0; v < kPartialVectors; ++v) store(partial + v * kLanes, sums[v]);
  for (int half = kPartialSums / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) partial[i] += partial[i + half];
  }
  return partial[0];
}

float sum_squares(const float* x, int size) {
  V sums[kPartialVectors];
  for (V& sum : sums) sum = zero();
  for (int i = 0; i < size; i += kPartialSums) {
    for (int v = 0; v < kPartialVectors; ++v) {
      const int at = i + v * kLanes;
      if (at >= size) break;
      const V values = load_up_to(x + at, size - at);
      sums[v] = fma(values, values, sums[v]);
    }
  }
  return add_partial_sums(sums);
}

void divide(const float* x, float divisor, float* out, int size) {
  const V by = set1(divisor);
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) store(out + i, div(load(x + i), by));
  if (i < size) store_n(out + i, div(load_n(x + i, size - i), by), size - i);
}

float quantise(const float* y, const float* boundaries, int levels, const float* table,
               uint8_t* codes, int size) {
  const Table centroids = make_table(table);
  V sums[kPartialVectors];
  for (V& sum : sums) sum = zero();
  for (int j = 0; j < size; j += kPartialSums) {
    for (int v = 0; v < kPartialVectors; ++v) {
      const int at = j + v * kLanes;
      if (at >= size) break;
      const V values = load_up_to(y + at, size - at);
      I count = zero_codes();
      for (int i = 0; i + 1 < levels; ++i) count = count_at_least(count, values, set1(boundaries[i]));
      store_bytes(codes + at, count, size - at);
      V chosen = lookup(centroids, count);
      if (size - at < kLanes) chosen = keep_n(chosen, size - at);
      sums[v] = fma(chosen, chosen, sums[v]);
    }
  }
  return add_partial_sums(sums);
}

// ---- products of matrices: every element is one chain of fused multiply-adds over rising k, so
// the tiling never shows in the bits.
template <int ROWS, int VECTORS>
TQ_INLINE void multiply_tile(const float* a, ptrdiff_t lda, const float* b, ptrdiff_t ldb, float* c,
                             ptrdiff_t ldc, int k, bool accumulate) {
  V sums[ROWS][VECTORS];
  for (int r = 0; r < ROWS; ++r) {
    for (int v = 0; v < VECTORS; ++v) {
      sums[r][v] = accumulate ? load(c + r * ldc + v * kLanes) : zero();
    }
  }
  for (int i = 0; i < k; ++i) {
    V right[VECTORS];
    for (int v = 0; v < VECTORS; ++v) right[v] = load(b + i * ldb + v * kLanes);
    for (int r = 0; r < ROWS; ++r) {
      const V left = set1(a[r * lda + i]);
      for (int v = 0; v < VECTORS; ++v) sums[r][v] = fma(left, right[v], sums[r][v]);
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    for (int v = 0; v < VECTORS; ++v) store(c + r * ldc + v * kLanes, sums[r][v]);
  }
}

// The last, partial vector of a row.
TQ_INLINE void multiply_rest(const float* a, const float* b, ptrdiff_t ldb, float* c, int k,
                             int lanes) {
  V sum = zero();
  for (int i = 0; i < k; ++i) sum = fma(set1(a[i]), load_n(b + i * ldb, lanes), sum);
  store_n(c, sum, lanes);
}

template <int ROWS>
void multiply_rows(const float* a, ptrdiff_t lda, const float* b, ptrdiff_t ldb, float* c,
                   ptrdiff_t ldc, int n, int k, bool accumulate) {
  int j = 0;
  for (; j + kTileN * kLanes <= n; j += kTileN * kLanes) {
    multiply_tile<ROWS, kTileN>(a, lda, b + j, ldb, c + j, ldc, k, accumulate);
  }
  for (; j + kLanes <= n; j += kLanes) {
    multiply_tile<ROWS, 1>(a, lda, b + j, ldb, c + j, ldc, k, accumulate);
  }
  if (j < n) {
    for (int r = 0; r < ROWS; ++r) multiply_rest(a + r * lda, b + j, ldb, c + r * ldc + j, k, n - j);
  }
}

void multiply(const float* a, int lda, const float* b, int ldb, float* c, int ldc, int m, int n,
              int k, bool accumulate) {
  static_assert(kTileM == 6, "one case per number of rows");
  while (m > 0) {
    const int rows = smaller(m, kTileM);
    switch (rows) {
      case 1:
        multiply_rows<1>(a, lda, b, ldb, c, ldc, n, k, accumulate);
        break;
      case 2:
        multiply_rows<2>(a, lda, b, ldb, c, ldc, n, k, accumulate);
        break;
      case 3:
        multiply_rows<3>(a, lda, b, ldb, c, ldc, n, k, accumulate);
        break;
      case 4:
        multiply_rows<4>(a, lda, b, ldb, c, ldc, n, k, accumulate);
        break;
      case 5:
        multiply_rows<5>(a, lda, b, ldb, c, ldc, n, k, accumulate);
        break;
      default:
        multiply_rows<6>(a, lda, b, ldb, c, ldc, n, k, accumulate);
    }
    m -= rows;
    a += static_cast<ptrdiff_t>(rows) * lda;
    c += static_cast<ptrdiff_t>(rows) * ldc;
  }
}

void rotate(const float* x, const float* rotation, float* y, int rows, int head_size) {
  multiply(x, head_size, rotation, head_size, y, head_size, rows, head_size, head_size, false);
}

// ---- unpacking: one chunk is the bytes of kLanes neighbouring coordinates of every slot.
template <int BITS>
constexpr int kSlots = BITS == 4 ? 2 : (BITS == 2 ? 4 : 8);

template <int BITS>
struct Chunk {
  I bytes;
};
template <>
struct Chunk<3> {
  I even, odd, high;  // two-bit plane of the even and of the odd slots, one-bit plane
};

template <int N>
struct Number {
  static constexpr int value = N;
};

// PARTIAL is 1 for the last chunk of a slot where it has fewer than kLanes bytes.
template <int BITS, int PARTIAL>
TQ_INLINE Chunk<BITS> load_chunk(const RowFormat& format, const uint8_t* row, int at) {
  const int n = PARTIAL ? format.slot_size - at : kLanes;
  if constexpr (BITS == 3) {
    return {load_bytes(row + at, n), load_bytes(row + format.slot_size + at, n),
            load_bytes(row + format.high_plane + at, n)};
  } else {
    return {load_bytes(row + at, n)};
  }
}

// Bits above the code are arbitrary; the table repeats.
template <int BITS, int SLOT>
TQ_INLINE I codes_of(const Chunk<BITS>& chunk) {
  if constexpr (BITS == 3) {
    const I low = shift_right<2 * (SLOT / 2)>(SLOT % 2 ? chunk.odd : chunk.even);
    return low_2_of(low, shift_right<SLOT>(shift_left_2(chunk.high)));
  } else {
    return shift_right<BITS * SLOT>(chunk.bytes);
  }
}

// body(Number<PARTIAL>, at) for every chunk.
template <class Body>
TQ_INLINE void for_each_chunk(const RowFormat& format, Body&& body) {
  int at = 0;
  for (; at + kLanes <= format.slot_size; at += kLanes) body(Number<0>{}, at);
  if (at < format.slot_size) body(Number<1>{}, at);
}

// body(Number<0>), ..., body(Number<LAST - 1>)
template <int LAST, int FIRST = 0, class Body>
TQ_INLINE void for_each_slot(Body&& body) {
  if constexpr (FIRST < LAST) {
    body(Number<FIRST>{});
    for_each_slot<LAST, FIRST + 1>(body);
  }
}

// ---- few query rows: decoded keys and values stay in registers
template <int BITS, int QUERIES, int ROWS>
TQ_INLINE void score_tile(const RowFormat& format, const uint8_t* rows, const Table& table,
                          const float* query, float* scores) {
  V sums[QUERIES][4];
  for (int q = 0; q < QUERIES; ++q) {
    for (int r = 0; r < 4; ++r) sums[q][r] = zero();
  }
  for_each_chunk(format, [&](auto partial, int at) {
    constexpr int kPartial = decltype(partial)::value;
    Chunk<BITS> chunk[ROWS];
    for (int r = 0; r < ROWS; ++r) {
      chunk[r] = load_chunk<BITS, kPartial>(format, rows + r * format.row_bytes, at);
    }
    for_each_slot<kSlots<BITS>>([&](auto slot) {
      constexpr int kSlot = decltype(slot)::value;
      const float* const q_at = query + kSlot * format.padded_slot + at;
      for (int r = 0; r < ROWS; ++r) {
        const V key = lookup(table, codes_of<BITS, kSlot>(chunk[r]));
        for (int q = 0; q < QUERIES; ++q) {
          sums[q][r] = fma(key, load(q_at + q * format.padded), sums[q][r]);
        }
      }
    });
  });
  for (int q = 0; q < QUERIES; ++q) {
    if constexpr (ROWS == 4) {
      store_4_sums(scores + q * kBlock, sums[q][0], sums[q][1], sums[q][2], sums[q][3]);
    } else {
      float four[4];
      store_4_sums(four, sums[q][0], sums[q][1], sums[q][2], sums[q][3]);
      scores[q * kBlock] = four[0];
    }
  }
}

// Asks for the rows one block further on, which the next call wants; never faults.
TQ_INLINE void prefetch_rows(const uint8_t* row, int row_bytes, int rows) {
  const uintptr_t from = reinterpret_cast<uintptr_t>(row) + static_cast<uintptr_t>(kBlock * row_bytes);
  for (int at = 0; at < rows * row_bytes; at += 64) {
    prefetch(reinterpret_cast<const void*>(from + static_cast<uintptr_t>(at)));
  }
}

template <int BITS, int QUERIES>
void score_group(const RowFormat& format, const uint8_t* rows, int count, const float* table,
                 const float* query, float* scores) {
  const Table centroids = make_table(table);
  int t = 0;
  for (; t + 4 <= count; t += 4) {
    prefetch_rows(rows + t * format.row_bytes, format.row_bytes, 4);
    score_tile<BITS, QUERIES, 4>(format, rows + t * format.row_bytes, centroids, query, scores + t);
  }
  for (; t < count; ++t) {
    score_tile<BITS, QUERIES, 1>(format, rows + t * format.row_bytes, centroids, query, scores + t);
  }
}

template <int BITS, int QUERIES>
void accumulate_group(const RowFormat& format, const uint8_t* rows, int count, const float* table,
                      const float* weights, float* sums) {
  constexpr int kFit = kSumRegisters / (QUERIES * kSlots<BITS>);
  constexpr int kChunks = kFit < 1 ? 1 : (kFit > 4 ? 4 : kFit);
  const Table centroids = make_table(table);
  prefetch_rows(rows, format.row_bytes, count);
  const auto pass = [&](auto chunks, auto partial, int at) {
    constexpr int kPass = decltype(chunks)::value;
    constexpr int kPartial = decltype(partial)::value;
    V total[kPass][kSlots<BITS>][QUERIES];
    for (int c = 0; c < kPass; ++c) {
      for (int s = 0; s < kSlots<BITS>; ++s) {
        for (int q = 0; q < QUERIES; ++q) {
          total[c][s][q] =
              load(sums + q * format.padded + s * format.padded_slot + at + c * kLanes);
        }
      }
    }
    const uint8_t* row = rows;
    for (int t = 0; t < count; ++t, row += format.row_bytes) {
      for (int c = 0; c < kPass; ++c) {
        const Chunk<BITS> chunk = load_chunk<BITS, kPartial>(format, row, at + c * kLanes);
        for_each_slot<kSlots<BITS>>([&](auto slot) {
          constexpr int kSlot = decltype(slot)::value;
          const V value = lookup(centroids, codes_of<BITS, kSlot>(chunk));
          for (int q = 0; q < QUERIES; ++q) {
            total[c][kSlot][q] = fma(value, set1(weights[q * kBlock + t]), total[c][kSlot][q]);
          }
        });
      }
    }
    for (int c = 0; c < kPass; ++c) {
      for (int s = 0; s < kSlots<BITS>; ++s) {
        for (int q = 0; q < QUERIES; ++q) {
          store(sums + q * format.padded + s * format.padded_slot + at + c * kLanes,
                total[c][s][q]);
        }
      }
    }
  };
  int at = 0;
  if constexpr (kChunks > 1) {
    for (; at + kChunks * kLanes <= format.slot_size; at += kChunks * kLanes) {
      pass(Number<kChunks>{}, Number<0>{}, at);
    }
  }
  for (; at + kLanes <= format.slot_size; at += kLanes) pass(Number<1>{}, Number<0>{}, at);
  if (at < format.slot_size) pass(Number<1>{}, Number<1>{}, at);
}

template <int BITS>
void score_rows_of(const RowFormat& format, const uint8_t* rows, int count, const float* table,
                   const float* query, int queries, float* scores) {
  while (queries > 0) {
    const int group = smaller(queries, kScoreGroup);
    switch (group) {
      case 1:
        score_group<BITS, 1>(format, rows, count, table, query, scores);
        break;
      case 2:
        score_group<BITS, 2>(format, rows, count, table, query, scores);
        break;
      case 3:
        if constexpr (kScoreGroup >= 3) score_group<BITS, 3>(format, rows, count, table, query, scores);
        break;
      case 4:
        if constexpr (kScoreGroup >= 4) score_group<BITS, 4>(format, rows, count, table, query, scores);
        break;
      case 5:
        if constexpr (kScoreGroup >= 5) score_group<BITS, 5>(format, rows, count, table, query, scores);
        break;
      default:
        if constexpr (kScoreGroup >= 6) score_group<BITS, 6>(format, rows, count, table, query, scores);
    }
    queries -= group;
    query += static_cast<ptrdiff_t>(group) * format.padded;
    scores += group * kBlock;
  }
}

template <int BITS>
void accumulate_rows_of(const RowFormat& format, const uint8_t* rows, int count, const float* table,
                        const float* weights, int queries, float* sums) {
  while (queries > 0) {
    const int group = smaller(queries, kScoreGroup);
    switch (group) {
      case 1:
        accumulate_group<BITS, 1>(format, rows, count, table, weights, sums);
        break;
      case 2:
        accumulate_group<BITS, 2>(format, rows, count, table, weights, sums);
        break;
      case 3:
        if constexpr (kScoreGroup >= 3) accumulate_group<BITS, 3>(format, rows, count, table, weights, sums);
        break;
      case 4:
        if constexpr (kScoreGroup >= 4) accumulate_group<BITS, 4>(format, rows, count, table, weights, sums);
        break;
      case 5:
        if constexpr (kScoreGroup >= 5) accumulate_group<BITS, 5>(format, rows, count, table, weights, sums);
        break;
      default:
        if constexpr (kScoreGroup >= 6) accumulate_group<BITS, 6>(format, rows, count, table, weights, sums);
    }
    queries -= group;
    weights += group * kBlock;
    sums += static_cast<ptrdiff_t>(group) * format.padded;
  }
}

void score_rows(const RowFormat& format, const uint8_t* rows, int count, const float* table,
                const float* query, int queries, float* scores) {
  switch (format.bits) {
    case 4:
      return score_rows_of<4>(format, rows, count, table, query, queries, scores);
    case 3:
      return score_rows_of<3>(format, rows, count, table, query, queries, scores);
    default:
      return score_rows_of<2>(format, rows, count, table, query, queries, scores);
  }
}

void accumulate_rows(const RowFormat& format, const uint8_t* rows, int count, const float* table,
                     const float* weights, int queries, float* sums) {
  switch (format.bits) {
    case 4:
      return accumulate_rows_of<4>(format, rows, count, table, weights, queries, sums);
    case 3:
      return accumulate_rows_of<3>(format, rows, count, table, weights, queries, sums);
    default:
      return accumulate_rows_of<2>(format, rows, count, table, weights, queries, sums);
  }
}

// ---- many query rows: decode a block once, to memory
template <int BITS>
void decode_columns_of(const RowFormat& format, const uint8_t* rows, int count, const float* table,
                       float* keys) {
  const Table centroids = make_table(table);
  for (int t = 0; t < count; t += kLanes) {
    const int some = smaller(kLanes, count - t);
    for_each_chunk(format, [&](auto partial, int at) {
      constexpr int kPartial = decltype(partial)::value;
      for_each_slot<kSlots<BITS>>([&](auto slot) {
        constexpr int kSlot = decltype(slot)::value;
        V lanes[kLanes];
        for (int r = 0; r < kLanes; ++r) {
          lanes[r] = zero();
          if (r < some) {
            const uint8_t* const row = rows + (t + r) * format.row_bytes;
            lanes[r] = lookup(
                centroids, codes_of<BITS, kSlot>(load_chunk<BITS, kPartial>(format, row, at)));
          }
        }
        transpose_lanes(lanes);
        float* const out = keys + static_cast<ptrdiff_t>(kSlot * format.padded_slot + at) * kBlock + t;
        for (int j = 0; j < kLanes; ++j) store(out + j * kBlock, lanes[j]);
      });
    });
  }
}

template <int BITS>
void decode_rows_of(const RowFormat& format, const uint8_t* rows, int count, const float* table,
                    float* values) {
  const Table centroids = make_table(table);
  for (int t = 0; t < count; ++t, rows += format.row_bytes, values += format.padded) {
    for_each_chunk(format, [&](auto partial, int at) {
      constexpr int kPartial = decltype(partial)::value;
      const Chunk<BITS> chunk = load_chunk<BITS, kPartial>(format, rows, at);
      for_each_slot<kSlots<BITS>>([&](auto slot) {
        constexpr int kSlot = decltype(slot)::value;
        store(values + kSlot * format.padded_slot + at,
              lookup(centroids, codes_of<BITS, kSlot>(chunk)));
      });
    });
  }
}

void decode_columns(const RowFormat& format, const uint8_t* rows, int count, const float* table,
                    float* keys) {
  switch (format.bits) {
    case 4:
      return decode_columns_of<4>(format, rows, count, table, keys);
    case 3:
      return decode_columns_of<3>(format, rows, count, table, keys);
    default:
      return decode_columns_of<2>(format, rows, count, table, keys);
  }
}

void decode_rows(const RowFormat& format, const uint8_t* rows, int count, const float* table,
                 float* values) {
  switch (format.bits) {
    case 4:
      return decode_rows_of<4>(format, rows, count, table, values);
    case 3:
      return decode_rows_of<3>(format, rows, count, table, values);
    default:
      return decode_rows_of<2>(format, rows, count, table, values);
  }
}

void row_scales(const RowFormat& format, const uint8_t* rows, int count, float* scales) {
  uint16_t bits[kBlock] = {};
  const uint8_t* at = rows + format.scale_offset;
  for (int t = 0; t < count; ++t, at += format.row_bytes) {
    bits[t] = static_cast<uint16_t>(at[0] | at[1] << 8);
  }
  half_to_float(bits, scales, kBlock);
}

// ---- softmax
// exp(x) for x <= 0 to 2 in 10^7; zero below the smallest normal number; NaN stays NaN.
TQ_INLINE V exponential(V x) {
  const V smallest = set1(-87.3365402f);
  const M vanishes = less_equal(x, smallest);
  x = max(smallest, x);  // NaN is the second operand and passes
  const I n = round_to_int(mul(x, set1(1.44269504f)));
  const V whole = to_float(n);
  V f = fma(whole, set1(-0.693359375f), x);
  f = fma(whole, set1(2.12194440e-4f), f);
  V p = set1(1.9875691500e-4f);
  p = fma(p, f, set1(1.3981999507e-3f));
  p = fma(p, f, set1(8.3334519073e-3f));
  p = fma(p, f, set1(4.1665795894e-2f));
  p = fma(p, f, set1(1.6666665459e-1f));
  p = fma(p, f, set1(5.0000001201e-1f));
  p = add(fma(mul(p, f), f, f), set1(1.0f));
  return select(vanishes, zero(), times_power_of_two(p, n));
}

// (1 - e) / (1 + e) with e = exp(-2 |x|): absolute error of a few 1e-8.
TQ_INLINE V hyperbolic_tangent(V x) {
  const V e = exponential(mul(abs(x), set1(-2.0f)));
  return copy_sign(div(sub(set1(1.0f), e), add(set1(1.0f), e)), x);
}

float finish_scores(float* scores, const float* key_scales, const float* bias, float hide,
                    float softcap, int count, int low, int high) {
  const V hidden = set1(-__builtin_huge_valf());
  V top = hidden;
  for (int t = 0; t < count; t += kLanes) {
    V score = mul(load(scores + t), load(key_scales + t));
    if (softcap > 0.0f) {
      score = mul(set1(softcap), hyperbolic_tangent(div(score, set1(softcap))));
    }
    M visible = lanes_between(low - t, high - t);
    if (bias != nullptr) {
      const V more = load_up_to(bias + t, count - t);
      visible = and_not(visible, less_equal(more, set1(hide)));
      score = add(score, more);
    }
    score = select(visible, score, hidden);
    store(scores + t, score);
    top = max(score, top);  // NaN in the first operand is passed over
  }
  return lane_max(top);
}

float weigh(float* scores, const float* value_scales, int count, float max_score) {
  const V top = set1(max_score);
  const V hidden = set1(-__builtin_huge_valf());
  V sum = zero();
  for (int t = 0; t < count; t += kLanes) {
    V score = load(scores + t);
    if (count - t < kLanes) score = select(lanes_between(0, count - t), score, hidden);
    const V weight = exponential(sub(score, top));
    sum = add(sum, weight);
    // A key that contributes nothing contributes nothing even where its scale is not a number.
    store(scores + t, select(less_equal(weight, zero()), zero(), mul(weight, load(value_scales + t))));
  }
  return lane_sum(sum);
}

void scale(float* x, float factor, int size) {
  const V by = set1(factor);
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) store(x + i, mul(load(x + i), by));
  for (; i < size; ++i) x[i] *= factor;
}

constexpr tq::Kernels kKernels = {
    TQ_LEVEL,        kLanes,        kMaxFused,     half_to_float,   float_to_half,  sum_squares,
    divide,          rotate,        quantise,      multiply,        row_scales,     score_rows,
    accumulate_rows, decode_columns, decode_rows,  finish_scores,   weigh,          scale,
};

}  // namespace
