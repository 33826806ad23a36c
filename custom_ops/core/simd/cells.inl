// The number of boundaries that a number reaches by one comparison, with sixteen lanes: cells of one
// width lie over the boundaries, each with one of them at most. Numbers that rise go to cells that
// rise, whichever cell a number is rounded to, so that the count is exact.

namespace {

struct Cells {
  static constexpr int kCells = 32;
  // So large that the lowest bits of a float are those of a whole number.
  static constexpr float kWhole = 12582912.0f;

  V factor, origin;
  WideTable boundary;  // in each cell, or infinity
  I below[2];  // how many boundaries lie in lower cells

  // False where two boundaries share a cell, or do not rise.
  bool read(const float* boundaries, int count) {
    const float low = boundaries[0], range = boundaries[count - 1] - low;
    const float width = range > 0.0f ? (kCells - 2) / range : 1.0f;
    factor = set1(width);
    origin = set1(kWhole + 1.0f - low * width);
    float edges[kCells];
    int counts[kCells] = {};
    for (float& edge : edges) edge = INFINITY;
    int last = -1;
    for (int i = 0; i < count; ++i) {
      const int cell = _mm512_cvtsi512_si32(cell_of(set1(boundaries[i]))) & (kCells - 1);
      if (!(boundaries[i] - boundaries[i] == 0.0f) || cell <= last) return false;
      edges[cell] = boundaries[i];
      for (int k = cell + 1; k < kCells; ++k) ++counts[k];
      last = cell;
    }
    boundary = make_wide_table(edges);
    below[0] = _mm512_loadu_si512(counts);
    below[1] = _mm512_loadu_si512(counts + kLanes);
    return true;
  }

  // Bits above those of a cell are to be ignored. What is no number is in the first.
  TQ_INLINED I cell_of(V y) const {
    const V at_least = max(fma(y, factor, origin), set1(kWhole));
    return bits_of(_mm512_min_ps(at_least, set1(kWhole + kCells - 1)));
  }
  TQ_INLINED I operator()(V y) const {
    const I cell = cell_of(y);
    return count_at_least(_mm512_permutex2var_epi32(below[0], cell, below[1]), y,
                          lookup(boundary, cell));
  }
};

}  // namespace
