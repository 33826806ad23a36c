// Scores of a block get what offsets that turn add to them (core/rotary_offset.h): each row's pairs at
// the middle of the block, the sums of the slow ones in both bases, and half a block of cosines and of sines.

namespace {

using tq::RotaryBasis;
using tq::RotaryBlock;

constexpr int kHalf = tq::kBlock / 2;
constexpr int kSums = kHalf + 4;
constexpr int kRotaryStrip = kHalf / kLanes < 4 ? kHalf / kLanes : 4;

// Prefetches the lines of a range, as many at each of some steps.
struct PacedLines {
  PacedLines(tq::PrefetchRange range, int steps)
      : at(range.begin), end(at + range.bytes), each(range.bytes / (tq::kCacheLine * steps) + 1) {}

  TQ_INLINED void some() {
    for (ptrdiff_t i = 0; i < each && at < end; ++i, at += tq::kCacheLine) {
      prefetch(at);
    }
  }

  const uint8_t *at, *end;
  ptrdiff_t each;
};

// The compiler may not load a vector for each row instead of keeping it.
TQ_INLINE V keep(V v) {
#if defined(__x86_64__)
  __asm__("" : "+v"(v));
#elif defined(__aarch64__)
  __asm__("" : "+w"(v));
#endif
  return v;
}

// sums[r][k] = <weights[k], x[r]> of four neighbouring weights; x is [ROWS, width].
template <int ROWS>
TQ_INLINE void four_products(const RotaryBasis& basis, int k, int width, int slow, const float* x,
                             float (*sums)[kSums]) {
  V sum[ROWS][4];
  for (int r = 0; r < ROWS; ++r) {
    for (int j = 0; j < 4; ++j) sum[r][j] = zero();
  }
  const float* const weights = basis.weights + k * width;
  for (int i = basis.begins[k] / kLanes * kLanes; i < slow; i += kLanes) {
    V some[ROWS];
    for (int r = 0; r < ROWS; ++r) some[r] = load(x + r * width + i);
    for (int j = 0; j < 4; ++j) {
      const V weight = keep(load(weights + j * width + i));
      for (int r = 0; r < ROWS; ++r) sum[r][j] = fma(some[r], weight, sum[r][j]);
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    store_4_sums(sums[r] + k, sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
  }
}

// out[r] += sum over k of by[r * pitch + k] vectors[k], a strip of each.
template <int ROWS>
TQ_INLINE void add_waves(const float* by, ptrdiff_t pitch, const float* vectors, int count,
                         V (*out)[kRotaryStrip]) {
  for (int k = 0; k < count; ++k, vectors += kHalf) {
    V factor[ROWS];
    for (int r = 0; r < ROWS; ++r) factor[r] = set1(by[r * pitch + k]);
    for (int v = 0; v < kRotaryStrip; ++v) {
      const V some = keep(load(vectors + v * kLanes));
      for (int r = 0; r < ROWS; ++r) out[r][v] = fma(factor[r], some, out[r][v]);
    }
  }
}

// A strip of half a block: slow waves by their sums, fast ones by the pairs [ROWS, width].
template <int ROWS>
TQ_INLINE void waves_of(const RotaryBlock& block, const RotaryBasis& basis, const float* sums,
                        const float* pairs, int u, V (*out)[kRotaryStrip]) {
  for (int r = 0; r < ROWS; ++r) {
    for (int v = 0; v < kRotaryStrip; ++v) out[r][v] = zero();
  }
  add_waves<ROWS>(sums, kSums, basis.vectors + u, basis.rank, out);
  add_waves<ROWS>(pairs + block.slow, block.width, basis.vectors + basis.rank * kHalf + u,
                  block.fast, out);
}

template <int ROWS>
TQ_INLINE void add_rotary_rows(const RotaryBlock& block, const float* angles, const float* pairs,
                               ptrdiff_t pitch, const float* key_scales, float* scores,
                               PacedLines& later) {
  const int width = block.width;
  alignas(64) float turned[2 * ROWS * tq::kMaxFrequencies];  // [2, ROWS, width]
  alignas(64) float sums[2][ROWS][kSums];
  for (int r = 0; r < ROWS; ++r, pairs += pitch) {
    later.some();
    float *const even = turned + r * width, *const odd = even + ROWS * width;
    for (int i = 0; i < width; i += kLanes) {
      const V a = load(pairs + i), b = load(pairs + width + i);
      const V cosine = load(angles + i), sine = load(angles + width + i);
      store(even + i, fma(a, cosine, mul(b, sine)));
      store(odd + i, sub(mul(b, cosine), mul(a, sine)));
    }
  }
  for (int odd = 0; odd < 2; ++odd) {
    for (int k = 0; k < block.basis[odd].rank; k += 4) {
      four_products<ROWS>(block.basis[odd], k, width, block.slow, turned + odd * ROWS * width,
                          sums[odd]);
    }
  }
  for (int u = 0; u < kHalf; u += kRotaryStrip * kLanes) {
    V even[ROWS][kRotaryStrip], odd[ROWS][kRotaryStrip];
    later.some();
    waves_of<ROWS>(block, block.basis[0], sums[0][0], turned, u, even);
    later.some();
    waves_of<ROWS>(block, block.basis[1], sums[1][0], turned + ROWS * width, u, odd);
    for (int r = 0; r < ROWS; ++r) {
      float* const row = scores + r * kBlock;
      for (int v = 0; v < kRotaryStrip; ++v) {
        const int after = kHalf + u + v * kLanes, before = kBlock - kLanes - after;
        store(row + after,
              fma(load(row + after), load(key_scales + after), add(even[r][v], odd[r][v])));
        store(row + before, fma(load(row + before), load(key_scales + before),
                                reversed(sub(even[r][v], odd[r][v]))));
      }
    }
  }
}

void add_rotary(const RotaryBlock& block, const float* angles, const float* pairs, ptrdiff_t pitch,
                int rows, const float* key_scales, float* scores, tq::PrefetchRange later) {
  constexpr int kStrips = kHalf / (kRotaryStrip * kLanes);
  PacedLines pace(later, rows + (rows + 2) / 3 * 2 * kStrips);
  for (int some; rows > 0; rows -= some, pairs += some * pitch, scores += some * kBlock) {
    some = rows == 4 ? 2 : smaller(rows, 3);
    if (some == 3) add_rotary_rows<3>(block, angles, pairs, pitch, key_scales, scores, pace);
    if (some == 2) add_rotary_rows<2>(block, angles, pairs, pitch, key_scales, scores, pace);
    if (some == 1) add_rotary_rows<1>(block, angles, pairs, pitch, key_scales, scores, pace);
  }
}

}  // namespace
