// Products of pairs of 16-bit integers with AVX-512 VNNI: c[m][n] (+)= steps[m] * a[m][k] b[k][n]. Sums
// of products are exact. Beside the kernels of avx512.
#include "core/simd/level.h"

// Before a loop over accumulators, which are registers only if the loop is gone: Clang gives up on
// large ones.
#if defined(__clang__)
#define TQ_UNROLL _Pragma("clang loop unroll(full)")
#else
#define TQ_UNROLL
#endif

namespace {

constexpr int kWords = 16;
constexpr int kTileRows = 6, kTileVectors = 4;

// GCC 12 copies the accumulators of the intrinsic at every use, Clang 22 makes two instructions of it.
TQ_INLINE __m512i add_products(__m512i sum, __m512i a, __m512i b) {
#if defined(__GNUC__)
  __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
#else
  return _mm512_dpwssd_epi32(sum, a, b);
#endif
}

template <int ROWS, int VECTORS>
TQ_INLINE void multiply_tile(const int32_t* a, ptrdiff_t lda, const int32_t* b, ptrdiff_t ldb,
                             float* c, ptrdiff_t ldc, int k, const float* steps, bool accumulate) {
  __m512i sums[ROWS][VECTORS];
  TQ_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    for (int v = 0; v < VECTORS; ++v) sums[r][v] = _mm512_setzero_si512();
  }
  for (int i = 0; i < k; ++i) {
    __m512i right[VECTORS];
    for (int v = 0; v < VECTORS; ++v) right[v] = _mm512_loadu_si512(b + i * ldb + v * kWords);
    TQ_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      const __m512i left = _mm512_set1_epi32(a[r * lda + i]);
      for (int v = 0; v < VECTORS; ++v) sums[r][v] = add_products(sums[r][v], left, right[v]);
    }
  }
  TQ_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    const __m512 step = _mm512_set1_ps(steps[r]);
    for (int v = 0; v < VECTORS; ++v) {
      float* const out = c + r * ldc + v * kWords;
      const __m512 sum = _mm512_cvtepi32_ps(sums[r][v]);
      _mm512_storeu_ps(out, accumulate ? _mm512_fmadd_ps(sum, step, _mm512_loadu_ps(out))
                                       : _mm512_mul_ps(sum, step));
    }
  }
}

template <int ROWS>
void multiply_rows(const int32_t* a, ptrdiff_t lda, const int32_t* b, ptrdiff_t ldb, float* c,
                   ptrdiff_t ldc, int n, int k, const float* steps, bool accumulate) {
  int j = 0;
  for (; j + kTileVectors * kWords <= n; j += kTileVectors * kWords) {
    multiply_tile<ROWS, kTileVectors>(a, lda, b + j, ldb, c + j, ldc, k, steps, accumulate);
  }
  // What is left over of a row, at once: one vector has too few sums to hide their latency.
  switch ((n - j) / kWords) {
    case 3:
      return multiply_tile<ROWS, 3>(a, lda, b + j, ldb, c + j, ldc, k, steps, accumulate);
    case 2:
      return multiply_tile<ROWS, 2>(a, lda, b + j, ldb, c + j, ldc, k, steps, accumulate);
    case 1:
      return multiply_tile<ROWS, 1>(a, lda, b + j, ldb, c + j, ldc, k, steps, accumulate);
    default:
      return;
  }
}

void multiply_pairs(const int32_t* a, int lda, const int32_t* b, int ldb, float* c, int ldc, int m,
                    int n, int k, const float* steps, bool accumulate) {
  int r = 0;
  for (; r + kTileRows <= m; r += kTileRows) {
    multiply_rows<kTileRows>(a + static_cast<ptrdiff_t>(r) * lda, lda, b, ldb,
                             c + static_cast<ptrdiff_t>(r) * ldc, ldc, n, k, steps + r, accumulate);
  }
  for (; r < m; ++r) {
    multiply_rows<1>(a + static_cast<ptrdiff_t>(r) * lda, lda, b, ldb,
                     c + static_cast<ptrdiff_t>(r) * ldc, ldc, n, k, steps + r, accumulate);
  }
}

}  // namespace

namespace tq {
MultiplyPairs avx512vnni_multiply_pairs() { return multiply_pairs; }
}  // namespace tq
