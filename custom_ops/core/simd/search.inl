// An encoder that searches, a gain per lane: the sums of a gain are one chain of fused multiply-adds
// over the coordinates, so that every level rounds the same (core/kernels.h).

namespace {

using tq::Found;
using tq::kMaxGains;
using tq::SearchTables;

constexpr int kMaxWidth = 512;  // coordinates of a vector
constexpr int kColumns = kLanes == 8 ? 4 : 8;  // that errors are fed back to at once; registers

// What each gain comes to.
struct Attempts {
  float worth[kMaxGains], product[kMaxGains], square[kMaxGains];

  void store(int at, V products, V squares) {
    const V positive = max(products, zero());
    ::store(worth + at, div(mul(positive, positive), squares));
    ::store(product + at, products);
    ::store(square + at, squares);
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

// Coordinates [from, from + kLanes) of y L, of which n are there.
TQ_INLINE V times_lower(const float* y, const float* lower, int size, int from) {
  V v = load_up_to(y + from, size - from);
  for (int i = size - 1; i > from; --i) {
    v = fma(set1(y[i]), load_up_to(lower + static_cast<ptrdiff_t>(i) * size + from, i - from), v);
  }
  return v;
}

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
  const float* y;
  const float* lower;
  float v[kMaxWidth + kLanes];  // y L
  float errors[kMaxWidth * kLanes];
  uint8_t codes[kMaxWidth * kMaxGains];
  V own, product, square;

  void begin(const float* vector, const float* feedback, int size) {
    y = vector;
    lower = feedback;
    for (int from = 0; from < size; from += kLanes) {
      store(v + from, times_lower(y, lower, size, from));
    }
  }
};

// Several vectors at once: each coordinate of one waits for the one before it.
template <int ROWS, class AnyTable, class Count>
TQ_INLINE void try_gains_with_feedback(const AnyTable& centroids, const Count& count_of, V gains,
                                       Fed* fed, int first_gain, int size) {
  const V inverse = div(set1(-1.0f), gains);
  for (int r = 0; r < ROWS; ++r) fed[r].own = fed[r].product = fed[r].square = zero();
  for (int first = size - kColumns; first >= 0; first -= kColumns) {
    V at[ROWS][kColumns];
    for (int r = 0; r < ROWS; ++r) {
      for (int k = 0; k < kColumns; ++k) at[r][k] = set1(fed[r].y[first + k]);
    }
    for (int i = size - 1; i >= first + kColumns; --i) {
      for (int r = 0; r < ROWS; ++r) {
        const float* const row = fed[r].lower + static_cast<ptrdiff_t>(i) * size + first;
        const V error = load(fed[r].errors + i * kLanes);
        for (int k = 0; k < kColumns; ++k) at[r][k] = fma(set1(row[k]), error, at[r][k]);
      }
    }
    for (int k = kColumns - 1; k >= 0; --k) {
      const int j = first + k;
      for (int r = 0; r < ROWS; ++r) {
        Fed& one = fed[r];
        const float* const row = one.lower + static_cast<ptrdiff_t>(j) * size + first;
        const I count = count_of(mul(gains, at[r][k]));
        store_bytes(one.codes + j * kMaxGains + first_gain, count, kLanes);
        const V c = lookup(centroids, count);
        const V error = fma(c, inverse, set1(one.y[j]));
        store(one.errors + j * kLanes, error);
        for (int other = 0; other < k; ++other) {
          at[r][other] = fma(set1(row[other]), error, at[r][other]);
        }
        const V v = set1(one.v[j]), weight = set1(row[k]);
        const V p = sub(v, fma(c, inverse, at[r][k])), weighted = mul(weight, v);
        one.own = fma(weighted, v, one.own);
        one.product = fma(weighted, p, one.product);
        one.square = fma(mul(weight, p), p, one.square);
      }
    }
  }
}

template <int ROWS, class AnyTable, class Count>
TQ_INLINE void search_with_feedback(const AnyTable& centroids, const Count& count_of,
                                    const float* gains, int count, const float* const* feedback,
                                    const float* y, int size, uint8_t* codes, Found* found) {
  Fed fed[ROWS];
  Attempts attempts[ROWS];
  for (int r = 0; r < ROWS; ++r) fed[r].begin(y + r * size, feedback[r], size);
  for (int at = 0; at < count; at += kLanes) {
    try_gains_with_feedback<ROWS>(centroids, count_of, load(gains + at), fed, at, size);
    for (int r = 0; r < ROWS; ++r) attempts[r].store(at, fed[r].product, fed[r].square);
  }
  for (int r = 0; r < ROWS; ++r) {
    const int best = attempts[r].best(count);
    for (int j = 0; j < size; ++j) codes[r * size + j] = fed[r].codes[j * kMaxGains + best];
    float own[kLanes];
    store(own, fed[r].own);
    found[r] = {own[0], gains[best] * attempts[r].product[best],
                gains[best] * gains[best] * attempts[r].square[best]};
  }
}

template <class AnyTable, class Count>
TQ_INLINE Found search_one(const AnyTable& centroids, const Count& count_of, const float* gains,
                           int count, const float* y, int size, uint8_t* codes) {
  Attempts attempts;
  for (int at = 0; at < count; at += kLanes) {
    V product, square;
    try_gains(centroids, count_of, load(gains + at), y, size, &product, &square);
    attempts.store(at, product, square);
  }
  const int best = attempts.best(count);
  const V gain = set1(gains[best]);
  for (int j = 0; j < size; j += kLanes) {
    store_bytes(codes + j, count_of(mul(gain, load_up_to(y + j, size - j))), size - j);
  }
  return {1.0f, attempts.product[best], attempts.square[best]};
}

void search(const SearchTables& tables, const float* const* feedback, const float* y, int rows,
            int size, uint8_t* codes, Found* found) {
  float gains[kMaxGains];
  const int count = tables.count;
  for (int k = 0; k < kMaxGains; ++k) gains[k] = tables.gains[k < count ? k : 0];
  with_codes(tables.table, tables.boundaries, tables.levels,
             [&](const auto& centroids, const auto& count_of) {
    int r = 0;
    if (feedback != nullptr) {
      for (; r + 2 <= rows; r += 2) {
        search_with_feedback<2>(centroids, count_of, gains, count, feedback + r, y + r * size, size,
                                codes + r * size, found + r);
      }
      for (; r < rows; ++r) {
        search_with_feedback<1>(centroids, count_of, gains, count, feedback + r, y + r * size, size,
                                codes + r * size, found + r);
      }
    }
    for (; r < rows; ++r) {
      found[r] = search_one(centroids, count_of, gains, count, y + r * size, size, codes + r * size);
    }
  });
}

}  // namespace
