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

// How codes are found: the number of boundaries that a number reaches.
struct AllBoundaries {
  V boundary[31];
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

#ifdef TQ_BISECTS
// In one comparison per bit; boundaries are rising, levels at most 16.
template <int BITS>
struct Halves {
  V middle;
  Table next[BITS - 1];

  explicit Halves(const float* boundaries) {
    constexpr int kLevels = 1 << BITS;
    middle = set1(boundaries[kLevels / 2 - 1]);
    for (int bit = 1; bit < BITS; ++bit) {
      float padded[16] = {};
      const int step = kLevels >> bit;
      for (int i = 0; i < 1 << bit; ++i) padded[i] = boundaries[i * step + step / 2 - 1];
      next[bit - 1] = make_table(padded);
    }
  }
  TQ_INLINED I operator()(V y) const {
    I codes = count_at_least(zero_codes(), y, middle);
    for (int bit = 1; bit < BITS; ++bit) {
      codes = count_at_least(add_int(codes, codes), y, lookup_8(next[bit - 1], codes));
    }
    return codes;
  }
};

// What a search by halves takes for granted; not so where a boundary is not a number.
bool is_rising(const float* boundaries, int count) {
  for (int i = 0; i + 1 < count; ++i) {
    if (!(boundaries[i] <= boundaries[i + 1])) return false;
  }
  return true;
}
#endif

// Calls act(centroids, count_of) with the fastest way to find codes of so many levels.
template <class Act>
TQ_INLINE void with_codes(const float* table, const float* boundaries, int levels, Act&& act) {
#ifdef TQ_BISECTS
  if (is_rising(boundaries, levels - 1)) {
    if (levels == 16) return act(make_table(table), Halves<4>(boundaries));
    if (levels == 8) return act(make_table(table), Halves<3>(boundaries));
  }
#endif
  const AllBoundaries all(boundaries, levels);
  if (levels > 16) return act(make_wide_table(table), all);
  act(make_table(table), all);
}

float quantise(const float* y, const float* boundaries, int levels, const float* table,
               uint8_t* codes, int size) {
  V sums[kPartialVectors];
  for (V& sum : sums) sum = zero();
  with_codes(table, boundaries, levels, [&](const auto& centroids, const auto& count_of) {
    for (int j = 0; j < size; j += kPartialSums) {
      for (int v = 0; v < kPartialVectors; ++v) {
        const int at = j + v * kLanes;
        if (at >= size) break;
        const I count = count_of(load_up_to(y + at, size - at));
        store_bytes(codes + at, count, size - at);
        V chosen = lookup(centroids, count);
        if (size - at < kLanes) chosen = keep_n(chosen, size - at);
        sums[v] = fma(chosen, chosen, sums[v]);
      }
    }
  });
  return add_partial_sums(sums);
}

}  // namespace
