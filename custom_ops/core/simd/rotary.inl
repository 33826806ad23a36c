// Scores of a block get what offsets that turn add to them (core/rotary_offset.h): each row's pairs at
// the middle of the block, their sums in both bases, and half a block of cosines and of sines at a time.

namespace {

using tq::RotaryBlock;

// sums[k] = <weights[k], x> of some neighbouring weights, and zeros up to four.
template <int COUNT>
TQ_INLINE void some_products(const float* weights, int width, const float* x, float* sums) {
  constexpr int kStep = tq::kRotaryLanes;
  V sum[4] = {zero(), zero(), zero(), zero()};
  for (int i = 0; i < width; i += kStep, x += kStep, weights += kStep) {
    for (int at = 0; at < kStep; at += kLanes) {
      const V some = load(x + at);
      for (int j = 0; j < COUNT; ++j) sum[j] = fma(some, load(weights + j * width + at), sum[j]);
    }
  }
  store_4_sums(sums, sum[0], sum[1], sum[2], sum[3]);
}

TQ_INLINE void products_of(const tq::RotaryBasis& basis, int width, const float* x, float* sums) {
  int k = 0;
  for (; k + 4 <= basis.rank; k += 4) {
    some_products<4>(basis.weights + k * width, width, x, sums + k);
  }
  for (; k < basis.rank; k += 2) {
    some_products<2>(basis.weights + k * width, width, x, sums + k);
  }
}

// out = sum over k of by[k] vectors[k], of some neighbouring vectors of lanes.
template <int VECTORS>
TQ_INLINE void waves_of(const float* by, const float* vectors, int rank, V* out) {
  for (int v = 0; v < VECTORS; ++v) out[v] = zero();
  for (int k = 0; k < rank; k += 2, by += 2, vectors += kBlock) {
    for (int odd = 0; odd < 2; ++odd) {
      const V factor = set1(by[odd]);
      for (int v = 0; v < VECTORS; ++v) {
        out[v] = fma(factor, load(vectors + odd * (kBlock / 2) + v * kLanes), out[v]);
      }
    }
  }
}

void add_rotary(const RotaryBlock& block, const float* angles, const float* pairs, ptrdiff_t pitch,
                int rows, const float* key_scales, float* scores) {
  constexpr int kHalf = kBlock / 2;
  constexpr int kStrip = kHalf / kLanes < 4 ? kHalf / kLanes : 4;
  const int width = block.width;
  alignas(64) float turned[2 * tq::kMaxFrequencies];
  alignas(64) float sums[2][kHalf + 4];
  for (int r = 0; r < rows; ++r, pairs += pitch, scores += kBlock) {
    for (int i = 0; i < width; i += kLanes) {
      const V a = load(pairs + i), b = load(pairs + width + i);
      const V cosine = load(angles + i), sine = load(angles + width + i);
      store(turned + i, fma(a, cosine, mul(b, sine)));
      store(turned + width + i, sub(mul(b, cosine), mul(a, sine)));
    }
    products_of(block.cosines, width, turned, sums[0]);
    products_of(block.sines, width, turned + width, sums[1]);
    for (int u = 0; u < kHalf; u += kStrip * kLanes) {
      V even[kStrip], odd[kStrip];
      waves_of<kStrip>(sums[0], block.cosines.vectors + u, block.cosines.rank, even);
      waves_of<kStrip>(sums[1], block.sines.vectors + u, block.sines.rank, odd);
      for (int v = 0; v < kStrip; ++v) {
        const int later = kHalf + u + v * kLanes, sooner = kBlock - kLanes - later;
        store(scores + later,
              fma(load(scores + later), load(key_scales + later), add(even[v], odd[v])));
        store(scores + sooner, fma(load(scores + sooner), load(key_scales + sooner),
                                   reversed(sub(even[v], odd[v]))));
      }
    }
  }
}

}  // namespace
