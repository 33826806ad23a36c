// c[m][n] (+)= a[m][k] b[k][n], row-major with leading dimensions. Every element is one chain of
// fused multiply-adds over rising k, starting from c or zero, so the tiling (kTileM rows by kTileN
// vectors, or kTallM by kTallN) never shows in the bits and `rotate` gives the same bits at every
// level.

namespace {

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

template <int ROWS, int VECTORS = kTileN>
void multiply_rows(const float* a, ptrdiff_t lda, const float* b, ptrdiff_t ldb, float* c,
                   ptrdiff_t ldc, int n, int k, bool accumulate) {
  int j = 0;
  for (; j + VECTORS * kLanes <= n; j += VECTORS * kLanes) {
    multiply_tile<ROWS, VECTORS>(a, lda, b + j, ldb, c + j, ldc, k, accumulate);
  }
  // One vector at a time has too few sums to hide their latency.
  if constexpr (VECTORS > 3) {
    for (; j + 3 * kLanes <= n; j += 3 * kLanes) {
      multiply_tile<ROWS, 3>(a, lda, b + j, ldb, c + j, ldc, k, accumulate);
    }
  }
  if constexpr (VECTORS > 2) {
    for (; j + 2 * kLanes <= n; j += 2 * kLanes) {
      multiply_tile<ROWS, 2>(a, lda, b + j, ldb, c + j, ldc, k, accumulate);
    }
  }
  for (; j + kLanes <= n; j += kLanes) {
    multiply_tile<ROWS, 1>(a, lda, b + j, ldb, c + j, ldc, k, accumulate);
  }
  if (j < n) {
    for (int r = 0; r < ROWS; ++r) {
      multiply_rest(a + r * lda, b + j, ldb, c + r * ldc + j, k, n - j);
    }
  }
}

void multiply(const float* a, int lda, const float* b, int ldb, float* c, int ldc, int m, int n,
              int k, bool accumulate) {
  while (m > 0) {
    const bool is_tall = m % kTallM == 0 && m % kTileM != 0;  // eight: not six and two
    const int rows = is_tall ? kTallM : smaller(m, kTileM);
    if (is_tall) {
      multiply_rows<kTallM, kTallN>(a, lda, b, ldb, c, ldc, n, k, accumulate);
    } else {
      with_group<kTileM>(rows, [&](auto some) {
        multiply_rows<decltype(some)::value>(a, lda, b, ldb, c, ldc, n, k, accumulate);
      });
    }
    m -= rows;
    a += static_cast<ptrdiff_t>(rows) * lda;
    c += static_cast<ptrdiff_t>(rows) * ldc;
  }
}

void rotate(const float* x, int ldx, const float* matrix, int ldm, float* y, int ldy, int rows,
            int inner, int width) {
  multiply(x, ldx, matrix, ldm, y, ldy, rows, width, inner, false);
}

}  // namespace
