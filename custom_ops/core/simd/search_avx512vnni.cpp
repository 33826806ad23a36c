// Error feedback with products of bytes. Sums of whole numbers are exact, so the rows are those of
// every other level (core/kernels.h). What a row of numbers takes part in first is a block of columns,
// then a group of four, then one column.
#include "core/simd/level.h"
#include "core/simd/vec_avx512.h"
#include "core/simd/cells.inl"

namespace {

using tq::Feedback;
using tq::Found;
using tq::kFeedbackColumns;
using tq::kFeedbackZero;
using tq::kMaxGains;
using tq::SearchTables;

constexpr int kMaxWidth = 512;  // coordinates of a vector
constexpr int kGroup = 4;  // rows of bytes that one product adds up
constexpr int kGroups = kFeedbackColumns / kGroup;
constexpr int kLine = kFeedbackColumns * kGroup;  // bytes
constexpr int kRows = 4;  // vectors at once; registers

static_assert(kLanes == kMaxGains && kLanes == kFeedbackColumns && kLanes == tq::kPartialSums);

// sum + products of the numbers, without sign, and four bytes that all gains have in common.
TQ_INLINE I add_products(I sum, I numbers, const int8_t* bytes) {
  __asm__("vpdpbusd %2%{1to16%}, %1, %0"
          : "+v"(sum)
          : "v"(numbers), "m"(*reinterpret_cast<const int (*)[1]>(bytes)));
  return sum;
}

// Codes between rising boundaries that do not fit cells.
struct AllBoundaries {
  V boundary[15];
  int count;

  AllBoundaries(const float* boundaries, int levels) : count(levels - 1) {
    for (int i = 0; i < count; ++i) boundary[i] = set1(boundaries[i]);
  }
  TQ_INLINED I operator()(V y) const {
    I codes = zero_codes();
    for (int i = 0; i < count; ++i) codes = count_at_least(codes, y, boundary[i]);
    return codes;
  }
};

// The numbers of codes, and their bytes without sign at each place of a group.
struct Numbers {
  Table number;
  I byte[kGroup];

  explicit Numbers(const float* numbers) : number(make_table(numbers)) {
    byte[0] = add_int(round_to_int(number.entries), set1_int(kFeedbackZero));
    byte[1] = _mm512_slli_epi32(byte[0], 8);
    byte[2] = _mm512_slli_epi32(byte[0], 16);
    byte[3] = _mm512_slli_epi32(byte[0], 24);
  }
};

// One vector while its coordinates are coded; arrays are padded to whole blocks.
struct Fed {
  alignas(64) float y[kMaxWidth], v[kMaxWidth], weighted[kMaxWidth], scaled[kMaxWidth];
  alignas(64) I numbers[kMaxWidth / kGroup];
  alignas(64) I sums[kFeedbackColumns];
  Feedback feedback;
  float own;
  V product, square;
};

TQ_INLINE const int8_t* line_of(const Feedback& feedback, int block, int group, int columns) {
  return feedback.bytes + (static_cast<ptrdiff_t>(block) * (columns / kGroup) + group) * kLine;
}

template <int PLACE>
TQ_INLINE V factors_at(I line) {
  return to_float(_mm512_srai_epi32(_mm512_slli_epi32(line, 24 - 8 * PLACE), 24));
}

template <int ROWS>
TQ_INLINE void begin(Fed* fed, float unit, int columns) {
  V own[ROWS];
  for (int r = 0; r < ROWS; ++r) own[r] = zero();
  for (int block = 0; block < columns / kFeedbackColumns; ++block) {
    V whole[ROWS];
    for (int r = 0; r < ROWS; ++r) whole[r] = zero();
    for (int group = columns / kGroup - 1; group >= block * kGroups; --group) {
      for (int r = 0; r < ROWS; ++r) {
        const I line = _mm512_loadu_si512(line_of(fed[r].feedback, block, group, columns));
        const float* const y = fed[r].y + group * kGroup;
        whole[r] = fma(set1(y[3]), factors_at<3>(line), whole[r]);
        whole[r] = fma(set1(y[2]), factors_at<2>(line), whole[r]);
        whole[r] = fma(set1(y[1]), factors_at<1>(line), whole[r]);
        whole[r] = fma(set1(y[0]), factors_at<0>(line), whole[r]);
      }
    }
    const int from = block * kFeedbackColumns;
    for (int r = 0; r < ROWS; ++r) {
      Fed& one = fed[r];
      const V step = load(one.feedback.steps + from);
      const V v = fma(step, whole[r], load(one.y + from));
      const V weighted = mul(load(one.feedback.weights + from), v);
      store(one.v + from, v);
      store(one.weighted + from, weighted);
      store(one.scaled + from, mul(step, set1(-unit)));
      own[r] = fma(weighted, v, own[r]);
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    float partial[kLanes];
    store(partial, own[r]);
    for (int half = kLanes / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) partial[i] += partial[i + half];
    }
    fed[r].own = partial[0];
  }
}

// What the numbers behind a block come to in its columns.
TQ_INLINE void add_behind(Fed& one, int block, int columns) {
  I sums[kFeedbackColumns];
  const int32_t* const starts = one.feedback.starts + block * kFeedbackColumns;
  for (int k = 0; k < kFeedbackColumns; ++k) sums[k] = set1_int(starts[k]);
  for (int group = columns / kGroup - 1; group >= (block + 1) * kGroups; --group) {
    const int8_t* const line = line_of(one.feedback, block, group, columns);
    const I numbers = one.numbers[group];
    for (int k = 0; k < kFeedbackColumns; ++k) {
      sums[k] = add_products(sums[k], numbers, line + k * kGroup);
    }
  }
  for (int k = 0; k < kFeedbackColumns; ++k) one.sums[k] = sums[k];
}

template <int ROWS, class Count>
TQ_INLINE void code_group(Fed* fed, const Numbers& table, const Count& count_of, V gains, int block,
                          int own, int columns) {
  const int group = block * kGroups + own;
  I sums[ROWS][kGroup], packed[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    packed[r] = zero_codes();
    for (int k = 0; k < kGroup; ++k) sums[r][k] = fed[r].sums[own * kGroup + k];
    for (int other = kGroups - 1; other > own; --other) {
      const int at = block * kGroups + other;
      const int8_t* const line =
          line_of(fed[r].feedback, block, at, columns) + own * kGroup * kGroup;
      for (int k = 0; k < kGroup; ++k) {
        sums[r][k] = add_products(sums[r][k], fed[r].numbers[at], line + k * kGroup);
      }
    }
  }
  for (int k = kGroup - 1; k >= 0; --k) {
    const int j = group * kGroup + k;
    for (int r = 0; r < ROWS; ++r) {
      Fed& one = fed[r];
      const V steps = to_float(sums[r][k]);
      const I code = count_of(fma(set1(one.scaled[j]), steps, mul(gains, set1(one.v[j]))));
      const I byte = _mm512_permutexvar_epi32(code, table.byte[k]);
      packed[r] = or_int(packed[r], byte);
      const int8_t* const line =
          line_of(one.feedback, block, group, columns) + own * kGroup * kGroup;
      for (int other = 0; other < k; ++other) {
        sums[r][other] = add_products(sums[r][other], byte, line + other * kGroup);
      }
      const V q = fma(set1(one.feedback.steps[j]), steps, lookup(table.number, code));
      one.product = fma(set1(one.weighted[j]), q, one.product);
      one.square = fma(mul(set1(one.feedback.weights[j]), q), q, one.square);
    }
  }
  for (int r = 0; r < ROWS; ++r) fed[r].numbers[group] = packed[r];
}

// The first of the best.
TQ_INLINE int best_of(const SearchTables& tables, V products, V squares) {
  const int count = tables.count;
  float worth[kLanes];
  const V kept = max(products, set1(tables.least_product));
  store(worth, div(mul(kept, kept), max(squares, set1(tq::kLeastSquare))));
  int found = 0;
  for (int k = 1; k < count; ++k) {
    if (worth[k] > worth[found]) found = k;
  }
  return found;
}

template <int ROWS, class Count>
TQ_INLINE void search_rows(const SearchTables& tables, const Numbers& table, const Count& count_of,
                           V gains, const uint8_t* code_of, const Feedback* feedback,
                           const float* y, int size, uint8_t* codes, Found* found) {
  Fed fed[ROWS];
  const int columns = (size + kFeedbackColumns - 1) / kFeedbackColumns * kFeedbackColumns;
  for (int r = 0; r < ROWS; ++r) {
    fed[r].feedback = feedback[r];
    fed[r].product = fed[r].square = zero();
    for (int j = 0; j < columns; j += kLanes) {
      const int left = size - j;
      store(fed[r].y + j, left >= kLanes ? load(y + r * size + j) : load_n(y + r * size + j, left));
    }
  }
  begin<ROWS>(fed, tables.unit, columns);
  for (int block = columns / kFeedbackColumns - 1; block >= 0; --block) {
    for (int r = 0; r < ROWS; ++r) add_behind(fed[r], block, columns);
    for (int own = kGroups - 1; own >= 0; --own) {
      code_group<ROWS>(fed, table, count_of, gains, block, own, columns);
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    const int best = best_of(tables, fed[r].product, fed[r].square);
    float product[kLanes], square[kLanes];
    store(product, fed[r].product);
    store(square, fed[r].square);
    found[r] = {fed[r].own, product[best] * tables.unit,
                square[best] * (tables.unit * tables.unit)};
    const uint8_t* const bytes = reinterpret_cast<const uint8_t*>(fed[r].numbers) + best * kGroup;
    for (int j = 0; j < size; ++j) {
      codes[r * size + j] = code_of[bytes[j / kGroup * (kLanes * kGroup) + j % kGroup]];
    }
  }
}

void search_bytes(const SearchTables& tables, const Feedback* feedback, const float* y, int rows,
                  int size, uint8_t* codes, Found* found) {
  const Numbers table(tables.numbers);
  float all_gains[kMaxGains];
  for (int k = 0; k < kMaxGains; ++k) all_gains[k] = tables.gains[k < tables.count ? k : 0];
  const V gains = load(all_gains);
  uint8_t code_of[256];
  for (int i = tables.levels - 1; i >= 0; --i) {
    code_of[static_cast<int>(tables.numbers[i]) + kFeedbackZero] = static_cast<uint8_t>(i);
  }
  Cells cells;
  const bool has_cells = cells.read(tables.boundaries, tables.levels - 1);
  const AllBoundaries all(tables.boundaries, tables.levels);
  for (int r = 0; r < rows;) {
    const Feedback* const own = feedback + r;
    const float* const from = y + r * size;
    uint8_t* const to = codes + r * size;
    const int left = has_cells ? rows - r : 1;
    switch (left) {
      case 1:
        if (has_cells) {
          search_rows<1>(tables, table, cells, gains, code_of, own, from, size, to, found + r);
        } else {
          search_rows<1>(tables, table, all, gains, code_of, own, from, size, to, found + r);
        }
        break;
      case 2:
        search_rows<2>(tables, table, cells, gains, code_of, own, from, size, to, found + r);
        break;
      case 3:
        search_rows<3>(tables, table, cells, gains, code_of, own, from, size, to, found + r);
        break;
      default:
        search_rows<kRows>(tables, table, cells, gains, code_of, own, from, size, to, found + r);
    }
    r += left < kRows ? left : kRows;
  }
}

}  // namespace

namespace tq {
SearchBytes avx512vnni_search_bytes() { return search_bytes; }
}  // namespace tq
