// The online softmax's two passes over one row of a block of kBlock scores.
//   finish_scores: score * key_scale + shift, then softcap * tanh(score / softcap), then + bias;
//                  hidden positions become -infinity; returns the maximum, NaN passed over
//   weigh:         exp(score - max) * value_scale; returns the sum of the exponentials, kLanes
//                  partial sums over rising positions added across lanes at the end

namespace {

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

float finish_scores(float* scores, const float* key_scales, const float* shift, const float* bias,
                    float hide, float softcap, int count, int low, int high) {
  const V hidden = set1(-__builtin_huge_valf());
  V top = hidden;
  for (int t = 0; t < count; t += kLanes) {
    V score = mul(load(scores + t), load(key_scales + t));
    if (shift != nullptr) score = add(score, load(shift + t));
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
    const V scaled = mul(weight, load(value_scales + t));
    store(scores + t, select(less_equal(weight, zero()), zero(), scaled));
  }
  return lane_sum(sum);
}

void add_scaled(float* x, const float* by, const float* other, const float* other_by, int count) {
  for (int t = 0; t < count; t += kLanes) {
    store(x + t, add(mul(load(x + t), load(by + t)), mul(load(other + t), load(other_by + t))));
  }
}

void scale(float* x, float factor, int size) {
  const V by = set1(factor);
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) store(x + i, mul(load(x + i), by));
  for (; i < size; ++i) x[i] *= factor;
}

}  // namespace
