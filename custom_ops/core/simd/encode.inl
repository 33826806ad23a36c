// The steps of an encode around the rotation. The same bits at every level: sums of squares collect
// x[i], x[i + kPartialSums], ... by fused multiply-add into kPartialSums partial sums, which are
// then added as a binary tree (upper half onto lower half).

namespace {

constexpr int kPartialVectors = kPartialSums / kLanes;

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

// count(y): the codes of one vector.
template <class AnyTable, class Count>
TQ_INLINE float quantise_with(const AnyTable& centroids, const float* y, uint8_t* codes, int size,
                              Count&& count_of) {
  V sums[kPartialVectors];
  for (V& sum : sums) sum = zero();
  for (int j = 0; j < size; j += kPartialSums) {
    for (int v = 0; v < kPartialVectors; ++v) {
      const int at = j + v * kLanes;
      if (at >= size) break;
      const V values = load_up_to(y + at, size - at);
      const I count = count_of(values);
      store_bytes(codes + at, count, size - at);
      V chosen = lookup(centroids, count);
      if (size - at < kLanes) chosen = keep_n(chosen, size - at);
      sums[v] = fma(chosen, chosen, sums[v]);
    }
  }
  return add_partial_sums(sums);
}

template <class AnyTable>
float quantise_by_all(const AnyTable& centroids, const float* y, const float* boundaries,
                      int levels, uint8_t* codes, int size) {
  return quantise_with(centroids, y, codes, size, [&](V values) TQ_INLINED {
    I count = zero_codes();
    for (int i = 0; i + 1 < levels; ++i) {
      count = count_at_least(count, values, set1(boundaries[i]));
    }
    return count;
  });
}

#ifdef TQ_BISECTS
// Between 16 levels, in four comparisons.
float quantise_by_halves(const float* table, const float* y, const float* boundaries,
                         uint8_t* codes, int size) {
  float padded[16] = {};
  for (int i = 0; i < 15; ++i) padded[i] = boundaries[i];
  const Table thresholds = make_table(padded);
  return quantise_with(make_table(table), y, codes, size, [&](V values) TQ_INLINED {
    I count = zero_codes();
    for (int step = 8; step > 0; step /= 2) {
      const V threshold = lookup(thresholds, add_int(count, set1_int(step - 1)));
      count = add_where_at_least(count, values, threshold, step);
    }
    return count;
  });
}

// What a search takes for granted; not so where a boundary is not a number.
bool is_rising(const float* boundaries, int count) {
  for (int i = 0; i + 1 < count; ++i) {
    if (!(boundaries[i] <= boundaries[i + 1])) return false;
  }
  return true;
}
#endif

float quantise(const float* y, const float* boundaries, int levels, const float* table,
               uint8_t* codes, int size) {
#ifdef TQ_BISECTS
  if (levels == 16 && is_rising(boundaries, 15)) {
    return quantise_by_halves(table, y, boundaries, codes, size);
  }
#endif
  if (levels > 16) {
    return quantise_by_all(make_wide_table(table), y, boundaries, levels, codes, size);
  }
  return quantise_by_all(make_table(table), y, boundaries, levels, codes, size);
}

}  // namespace
