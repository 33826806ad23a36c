// Weights and sums of values of a level that adds products in lanes of 16 bits (core/lane_sums.h).
// Values are looked up once, into memory of the first level, for all query rows. Included by
// integer.inl.

namespace {

constexpr int kStepRows = tq::kLaneStepRows;
constexpr int kSteps = kBlock / kStepRows;
constexpr int kStepGroups = kStepRows / 4;
static_assert(kStepRows == 4 * kWords && 2 * kSteps == kWords);
static_assert(kBlock / 4 + kWords <= tq::kOperandFloats);

// body(Number<vectors>) that are added in a lane.
template <class Body>
TQ_INLINE void with_added(const IntegerTable& table, Body&& body) {
  if (lane_vectors(table.largest) == kLaneVectors) return body(Number<kLaneVectors>{});
  body(Number<1>{});
}

// ---- keys
// Of a query in the order of its slots, `width` numbers each: what its step is made for at least.
TQ_INLINE float reach_of_query(const RowFormat& format, const IntegerTable& table,
                               const float* slotted, int width) {
  const bool of_two = format.slots > 1 && lane_vectors(table.largest) == kLaneVectors;
  float most = 0.0f;
  for (int i = 0; i < (of_two ? format.slots / 2 : format.slots); ++i) {
    const int first = !of_two ? i : (format.bits == 5 ? slot_at<5>(2 * i) : 2 * i);
    const int second = format.bits == 5 ? slot_at<5>(2 * i + 1) : first + 1;
    const float one = largest_lane_of(slotted + first * width,
                                      of_two ? slotted + second * width : nullptr, width);
    if (one > most) most = one;
  }
  return most * lane_share_of_query(table.largest);
}

template <int ADDED>
TQ_INLINE void add_products_of_keys(Sums* sums, const Codes (&codes)[ADDED][kTileVectors],
                                    const float* first, const float* last) {
  static_assert(kTileVectors == 1 && ADDED <= 2);
  Lanes lanes = products_of_keys(codes[0][0], first);
  if constexpr (ADDED == 2) lanes = sum_of_lanes(lanes, products_of_keys(codes[1][0], last));
  *sums = keep(sum_of_words(*sums, words_of(lanes)));
}

// ---- values
// codes[piece][slot][line][group]: those of kStepRows rows.
template <int BITS, int PACKED>
TQ_INLINE void look_up(const RowFormat& format, const Rows& rows, int t, int all,
                       const Tables& tables, PacedPrefetch& pace, Codes* codes) {
  constexpr int kLines = 4 / PACKED;
  const ptrdiff_t stride = rows.stride(t);
  const uint8_t* at[kSegments<BITS>];
  for_each_number<kSegments<BITS>>(
      [&](auto i) TQ_INLINED { at[decltype(i)::value] = rows.row(format, decltype(i)::value, t); });
  for (int group = 0; group < kStepGroups; ++group) {
    pace.step();
    Codes* to = codes + group;
    for (int piece = 0; piece < all; ++piece, to += kSlots<BITS> * kLines * kStepGroups) {
      Bytes from[kSegments<BITS>][4];
      for_each_number<kSegments<BITS>>([&](auto i) TQ_INLINED {
        constexpr int kSegment = decltype(i)::value;
        load_lines<PACKED, 0, PACKED == 1>(at[kSegment] + piece * (kBytes / PACKED), stride,
                                           from[kSegment]);
      });
      for_each_number<kSlots<BITS> * kLines>([&](auto i) TQ_INLINED {
        constexpr int kSlot = decltype(i)::value / kLines, kLine = decltype(i)::value % kLines;
        to[decltype(i)::value * kStepGroups] = codes_of<BITS, kSlot>(
            tables, from[kSlot % kLowSegments<BITS>][kLine], from[kSegments<BITS> - 1][kLine]);
      });
    }
    for_each_number<kSegments<BITS>>([&](auto i)
                                         TQ_INLINED { at[decltype(i)::value] += 4 * stride; });
  }
}

// The sum of the products of kStepRows values of a line.
template <int ADDED>
TQ_INLINE Sums sum_of_step(const Codes* codes, const Factors* weights) {
  constexpr int kParts = kStepGroups / ADDED;
  Sums parts[kParts];
  for_each_number<kParts>([&](auto i) TQ_INLINED {
    constexpr int kPart = decltype(i)::value, kFirst = kPart * ADDED;
    Lanes lanes = products_of_values(weights[kFirst], codes + kFirst);
    if constexpr (ADDED == 2) {
      lanes = sum_of_lanes(lanes, products_of_values(weights[kFirst + 1], codes + kFirst + 1));
    }
    const Sums words = words_of(lanes);
    parts[kPart] = kPart % 2 == 0 ? words : sum_of_words(parts[kPart - kPart % 2], words);
  });
  Sums total = parts[1];
  for_each_number<kParts / 2 - 1>(
      [&](auto i) TQ_INLINED { total = sum_of_words(total, parts[2 * decltype(i)::value + 3]); });
  return total;
}

// Of one query row.
template <int BITS, int PACKED, int ADDED>
TQ_INLINE void add_step(const Codes* codes, int all, const void* weights, float by, float* sums) {
  constexpr int kLines = 4 / PACKED;
  Factors group[kStepGroups];
  for_each_number<kStepGroups>([&](auto i) TQ_INLINED {
    constexpr int kGroup = decltype(i)::value;
    group[kGroup] = spread_group(static_cast<const uint8_t*>(weights) + 4 * kGroup);
  });
  const Floats step = spread(by);
  for (int piece = 0; piece < all; ++piece) {
    float* of_slot = sums + piece * kLines * kWords;
    for (int slot = 0; slot < kSlots<BITS>; ++slot, of_slot += all * kLines * kWords) {
      for_each_number<kLines>([&](auto line) TQ_INLINED {
        float* const at = of_slot + decltype(line)::value * kWords;
        store_floats(
            at, multiply_add(value_sums(sum_of_step<ADDED>(codes, group)), step, load_floats(at)));
        codes += kStepGroups;
      });
    }
  }
}

// A row of a block of weights: bytes, then of every kStepRows of them the value of a step, twice.
TQ_INLINE float step_at(const float* operands, int step) { return operands[kBlock / 4 + 2 * step]; }

template <int BITS, int PACKED>
void add_values(const RowFormat& format, const uint8_t* rows, int count, const IntegerTable& table,
                const Tables& entries, const float* operands, int queries, float* sums, int pitch,
                tq::PrefetchRange prefetch) {
  alignas(64) Codes codes[tq::kMaxIntegerWidth / kWords * kStepGroups];
  const Rows source(format, rows, count, kStepRows);
  const int all = pieces(format);
  const int steps = (count + kStepRows - 1) / kStepRows;
  PacedPrefetch pace(prefetch, steps * kStepGroups);
  with_added(table, [&](auto added) {
    for (int step = 0; step < steps; ++step) {
      look_up<BITS, PACKED>(format, source, step * kStepRows, all, entries, pace, codes);
      for (int q = 0; q < queries; ++q) {
        const float* const own = operands + q * tq::kOperandFloats;
        add_step<BITS, PACKED, decltype(added)::value>(codes, all, own + step * kStepGroups,
                                                       step_at(own, step) * table.unit,
                                                       sums + q * pitch);
      }
    }
  });
}

// ---- weights
// The largest of each half of a step of weights that are good, or what its lanes add if that asks for
// more.
struct Reach {
  Floats of_half[2 * kSteps];
  bool of_two;
  float share;

  TQ_INLINED inline void start(int largest) {
    of_two = lane_vectors(largest) == kLaneVectors;
    share = lane_share_of_weights(largest);
  }
  TQ_INLINED inline void set(int half, Floats a, Floats b) {
    const Floats lanes = lanes_of_weights(a, b, of_two);
    of_half[half] = larger(larger(a, b), product(lanes, spread(share)));
  }
};

TQ_INLINE void store_steps(const float* weights, const Reach& reach, float* operands) {
  alignas(64) float inverse[2 * kSteps];
  const Floats largest = largest_of_pairs(largest_of_each(reach.of_half));
  store_floats(inverse, inverse_steps(largest, tq::kLargestByteWeight));
  store_floats(operands + kBlock / 4, quotient(largest, spread(tq::kLargestByteWeight)));
  for (int step = 0; step < kSteps; ++step) {
    store_rounded(weights + step * kStepRows, inverse[2 * step], operands + step * kStepGroups);
  }
}

// Whether of kBlock numbers none is negative or not finite.
TQ_INLINE bool are_weights(const float* x) {
  Bits most = no_bits();
  for (int i = 0; i < kVectors; ++i) most = larger_bits(most, load_floats(x + i * kWords));
  const float top = largest_weight(most);
  return top == top;
}

// A row of kBlock weights; false, and nothing done, where one is negative or not finite.
TQ_INLINE bool store_row(const float* weights, int largest, float* operands) {
  if (!are_weights(weights)) return false;
  Reach reach;
  reach.start(largest);
  for (int half = 0; half < 2 * kSteps; ++half) {
    const float* const at = weights + half * (kStepRows / 2);
    reach.set(half, load_floats(at), load_floats(at + kWords));
  }
  store_steps(weights, reach, operands);
  return true;
}

// Rows go through the phases together: what one row waits for is another's time.
constexpr int kSoftmaxRows = 8;

template <int PARTS>
TQ_INLINE void softmax_rows(const float* scores, int rows, const float* key_scales,
                            const tq::PartScales& value_scales, float* maxima, float* exponentials,
                            float* operands, PacedPrefetch& pace) {
  alignas(64) float weights[kSoftmaxRows][PARTS][kBlock];
  float top[kSoftmaxRows];
  Reach reach[kSoftmaxRows][PARTS];
  bool have_scales = true;  // weights are at most 1: products with these are good
  for (int p = 0; p < PARTS; ++p) {
    have_scales = have_scales && are_weights(value_scales.scales + p * kBlock);
  }
  for (int r = 0; r < rows; ++r) {
    Floats x[kVectors];
    for (int i = 0; i < kVectors; ++i) {
      x[i] = product(load_floats(scores + r * kBlock + i * kWords),
                     load_floats(key_scales + i * kWords));
      store_floats(weights[r][0] + i * kWords, x[i]);
    }
    pace.step();
    const float most = largest_of_all<kVectors>(x);
    top[r] = most > maxima[r] ? most : maxima[r];
  }
  for (int r = 0; r < rows; ++r) {
    // NaN scores are passed over by the maximum, and make a weight NaN.
    Floats sum = spread(0.0f);
    const Floats from = spread(top[r]);
    for (int p = 0; p < PARTS; ++p) reach[r][p].start(value_scales.largest[p]);
    pace.step();
    for (int step = 0; step < kSteps; ++step) {
      constexpr int kTogether = kStepRows / kWords;
      Floats x[kTogether];
      float* const at = weights[r][0] + step * kStepRows;
      for (int i = 0; i < kTogether; ++i) x[i] = difference(load_floats(at + i * kWords), from);
      exponentials_of<kTogether>(x);
      sum = total_of_floats(
          sum, total_of_floats(total_of_floats(x[0], x[1]), total_of_floats(x[2], x[3])));
      for (int p = 0; p < PARTS; ++p) {
        Floats scaled[kTogether];
        const float* const scales = value_scales.scales + p * kBlock + step * kStepRows;
        for (int i = 0; i < kTogether; ++i) {
          scaled[i] = product(x[i], load_floats(scales + i * kWords));
          store_floats(at + p * kBlock + i * kWords, scaled[i]);
        }
        reach[r][p].set(2 * step, scaled[0], scaled[1]);
        reach[r][p].set(2 * step + 1, scaled[2], scaled[3]);
      }
    }
    const float total = sum_of_lanes(sum);
    const bool are_good = have_scales && top[r] < __builtin_huge_valf() &&
                          top[r] > -__builtin_huge_valf() && total < __builtin_huge_valf();
    exponentials[r] = are_good ? total : __builtin_nanf("");
  }
  for (int r = 0; r < rows; ++r) {
    if (!(exponentials[r] == exponentials[r])) continue;
    for (int p = 0; p < PARTS; ++p) {
      store_steps(weights[r][p], reach[r][p],
                  operands + r * tq::kOperandFloats + p * value_scales.pitch);
    }
    maxima[r] = top[r];
    pace.step();
  }
}

}  // namespace
