// An encoder that searches, a gain per lane: the sums of a gain are one chain of fused multiply-adds
// over the coordinates, so that every level rounds the same (core/kernels.h). Included behind
// encode.inl.
#ifdef TQ_CELLS
#include "core/simd/cells.inl"
#endif

namespace {

using tq::Feedback;
using tq::Found;
using tq::kMaxGains;
using tq::SearchTables;

constexpr int kMaxWidth = 512;  // coordinates of a vector
constexpr int kColumns = kLanes == 8 ? 4 : 8;  // that errors are fed back to at once; registers

// What each gain comes to.
struct Attempts {
  float least_product;  // see SearchTables
  float worth[kMaxGains], product[kMaxGains], square[kMaxGains];

  void keep(int at, V products, V squares) {
    const V kept = max(products, set1(least_product));
    store(worth + at, div(mul(kept, kept), max(squares, set1(tq::kLeastSquare))));
    store(product + at, products);
    store(square + at, squares);
  }
  // The first of the best.
  int best(int count) const {
    int found = 0;
    for (int k = 1; k < count; ++k) {
      if (worth[k] > worth[found]) found = k;
    }
    return found;
  }
};

template <class AnyTable, class Count>
TQ_INLINE void try_gains(const AnyTable& centroids, const Count& count_of, V gains, const float* y,
                         int size, V* products, V* squares) {
  V product = zero(), square = zero();
  for (int j = 0; j < size; ++j) {
    const V u = set1(y[j]);
    const V c = lookup(centroids, count_of(mul(gains, u)));
    product = fma(c, u, product);
    square = fma(c, c, square);
  }
  *products = product;
  *squares = square;
}

// One vector and the moments of the queries, while its coordinates are coded.
struct Fed {
  const float* lower;
  const float* weights;
  const float* steps;
  float v[kMaxWidth + kLanes], weighted[kMaxWidth + kLanes], scaled[kMaxWidth + kLanes];
  float numbers[kMaxWidth * kLanes];
  uint8_t codes[kMaxWidth * kMaxGains];
  float own;
  V product, square;

  void begin(const float* y, const Feedback& feedback, float unit, int size) {
    lower = feedback.lower;
    weights = feedback.weights;
    steps = feedback.steps;
    V sums[kPartialVectors];
    for (V& sum : sums) sum = zero();
    for (int from = 0; from < size; from += kLanes) {
      V whole = zero();
      for (int i = size - 1; i > from; --i) {
        const float* const row = lower + static_cast<ptrdiff_t>(i) * size;
        whole = fma(set1(y[i]), load_up_to(row + from, i - from), whole);
      }
      const V step = load(steps + from);  // zeros behind the last coordinate
      const V mine = fma(step, whole, load_up_to(y + from, size - from));
      const V heavy = mul(load(weights + from), mine);
      store(v + from, mine);
      store(weighted + from, heavy);
      store(scaled + from, mul(step, set1(-unit)));
      V& sum = sums[from / kLanes % kPartialVectors];
      sum = fma(heavy, mine, sum);
    }
    own = add_partial_sums(sums);
  }
};

// Several vectors at once: each coordinate of one waits for the one before it.
template <int ROWS, class AnyTable, class Count>
TQ_INLINE void try_gains_with_feedback(const AnyTable& numbers, const Count& count_of, V gains,
                                       Fed* fed, int first_gain, int size) {
  for (int r = 0; r < ROWS; ++r) fed[r].product = fed[r].square = zero();
  for (int first = size - kColumns; first >= 0; first -= kColumns) {
    V behind[ROWS][kColumns];
    for (int r = 0; r < ROWS; ++r) {
      for (int k = 0; k < kColumns; ++k) behind[r][k] = zero();
    }
    for (int i = size - 1; i >= first + kColumns; --i) {
      for (int r = 0; r < ROWS; ++r) {
        const float* const row = fed[r].lower + static_cast<ptrdiff_t>(i) * size + first;
        const V number = load(fed[r].numbers + i * kLanes);
        for (int k = 0; k < kColumns; ++k) behind[r][k] = fma(set1(row[k]), number, behind[r][k]);
      }
    }
    for (int k = kColumns - 1; k >= 0; --k) {
      const int j = first + k;
      for (int r = 0; r < ROWS; ++r) {
        Fed& one = fed[r];
        const float* const row = one.lower + static_cast<ptrdiff_t>(j) * size + first;
        const V steps = behind[r][k];
        const I count = count_of(fma(set1(one.scaled[j]), steps, mul(gains, set1(one.v[j]))));
        store_bytes(one.codes + j * kMaxGains + first_gain, count, kLanes);
        const V number = lookup(numbers, count);
        store(one.numbers + j * kLanes, number);
        for (int other = 0; other < k; ++other) {
          behind[r][other] = fma(set1(row[other]), number, behind[r][other]);
        }
        const V q = fma(set1(one.steps[j]), steps, number);
        one.product = fma(set1(one.weighted[j]), q, one.product);
        one.square = fma(mul(set1(one.weights[j]), q), q, one.square);
      }
    }
  }
}

template <int ROWS, class AnyTable, class Count>
TQ_INLINE void search_with_feedback(const AnyTable& numbers, const Count& count_of,
                                    const SearchTables& tables, const float* gains,
                                    const Feedback* feedback, const float* y, int size,
                                    uint8_t* codes, Found* found) {
  const int count = tables.count;
  const float unit = tables.unit;
  Fed fed[ROWS];
  Attempts attempts[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    attempts[r].least_product = tables.least_product;
    fed[r].begin(y + r * size, feedback[r], unit, size);
  }
  for (int at = 0; at < count; at += kLanes) {
    try_gains_with_feedback<ROWS>(numbers, count_of, load(gains + at), fed, at, size);
    for (int r = 0; r < ROWS; ++r) attempts[r].keep(at, fed[r].product, fed[r].square);
  }
  for (int r = 0; r < ROWS; ++r) {
    const int best = attempts[r].best(count);
    for (int j = 0; j < size; ++j) codes[r * size + j] = fed[r].codes[j * kMaxGains + best];
    found[r] = {fed[r].own, attempts[r].product[best] * unit,
                attempts[r].square[best] * (unit * unit)};
  }
}

template <class AnyTable, class Count>
TQ_INLINE Found search_one(const AnyTable& centroids, const Count& count_of, const SearchTables& tables,
                           const float* gains, const float* y, int size, uint8_t* codes) {
  const int count = tables.count;
  Attempts attempts;
  attempts.least_product = tables.least_product;
  for (int at = 0; at < count; at += kLanes) {
    V product, square;
    try_gains(centroids, count_of, load(gains + at), y, size, &product, &square);
    attempts.keep(at, product, square);
  }
  const int best = attempts.best(count);
  const V gain = set1(gains[best]);
  for (int j = 0; j < size; j += kLanes) {
    store_bytes(codes + j, count_of(mul(gain, load_up_to(y + j, size - j))), size - j);
  }
  return {1.0f, attempts.product[best], attempts.square[best]};
}

void search(const SearchTables& tables, const Feedback* feedback, const float* y, int rows,
            int size, uint8_t* codes, Found* found) {
  float gains[kMaxGains];
  const int count = tables.count;
  for (int k = 0; k < kMaxGains; ++k) gains[k] = tables.gains[k < count ? k : 0];
#ifdef TQ_CELLS
  Cells cells;
  if (feedback == nullptr && tables.levels <= 16 &&
      cells.read(tables.boundaries, tables.levels - 1)) {
    const Table centroids = make_table(tables.table);
    for (int r = 0; r < rows; ++r) {
      found[r] = search_one(centroids, cells, tables, gains, y + r * size, size, codes + r * size);
    }
    return;
  }
#endif
  const float* const table = feedback == nullptr ? tables.table : tables.numbers;
  with_codes(
      table, tables.boundaries, tables.levels, [&](const auto& centroids, const auto& count_of) {
        int r = 0;
        if (feedback != nullptr) {
          for (; r + 2 <= rows; r += 2) {
            search_with_feedback<2>(centroids, count_of, tables, gains, feedback + r,
                                    y + r * size, size, codes + r * size, found + r);
          }
          for (; r < rows; ++r) {
            search_with_feedback<1>(centroids, count_of, tables, gains, feedback + r,
                                    y + r * size, size, codes + r * size, found + r);
          }
        }
        for (; r < rows; ++r) {
          found[r] =
              search_one(centroids, count_of, tables, gains, y + r * size, size, codes + r * size);
        }
      });
}

}  // namespace
