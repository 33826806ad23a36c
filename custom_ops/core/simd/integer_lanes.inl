// Weights and sums of values of a level that adds products in lanes of 16 bits (core/lane_sums.h).
// Values are looked up once, into memory of the first level, for all query rows. Included by
// integer.inl.

namespace {

constexpr bool kHasLanes = true;
constexpr int kStepRows = tq::kLaneStepRows;
constexpr int kSteps = kBlock / kStepRows;
constexpr int kStepGroups = kStepRows / 4;
static_assert(kStepRows == 2 * kWords && kSteps == kWords && kStepGroups == 4);
static_assert(kBlock / 4 + kSteps <= tq::kOperandFloats);

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
// codes[line][group]: those of kStepRows rows, as the lines of sums lie.
template <int BITS, int PACKED>
TQ_INLINE void look_up(const RowFormat& format, const Rows& rows, int t, const Tables& tables,
                       PacedPrefetch& pace, Codes* codes) {
  constexpr int kLines = PACKED == 1 ? 4 : 2;
  const ptrdiff_t stride = rows.stride(t);
  const int all = pieces(format);
  for (int piece = 0; piece < all; ++piece) {
    const uint8_t* at[kSegments<BITS>];
    for_each_number<kSegments<BITS>>([&](auto i) TQ_INLINED {
      constexpr int kSegment = decltype(i)::value;
      at[kSegment] = rows.row(format, kSegment, t) + piece * (kBytes / PACKED);
    });
    Codes* const to = codes + piece * kLines * kStepGroups;
    const int next = all * kLines * kStepGroups;  // slot
    for (int group = 0; group < kStepGroups; ++group) {
      pace.step();
      Bytes from[kSegments<BITS>][4];
      for_each_number<kSegments<BITS>>([&](auto i) TQ_INLINED {
        constexpr int kSegment = decltype(i)::value;
        load_lines<PACKED, 0, PACKED == 1>(at[kSegment], stride, from[kSegment]);
        at[kSegment] += 4 * stride;
      });
      for_each_number<kSlots<BITS> * kLines>([&](auto i) TQ_INLINED {
        constexpr int kSlot = decltype(i)::value / kLines, kLine = decltype(i)::value % kLines;
        to[kSlot * next + kLine * kStepGroups + group] = codes_of<BITS, kSlot>(
            tables, from[kSlot % kLowSegments<BITS>][kLine], from[kSegments<BITS> - 1][kLine]);
      });
    }
  }
}

// Of one query row.
template <int ADDED>
TQ_INLINE void add_step(const Codes* codes, int lines, const void* weights, float by, float* sums) {
  Factors group[kStepGroups];
  for_each_number<kStepGroups>([&](auto i) TQ_INLINED {
    constexpr int kGroup = decltype(i)::value;
    group[kGroup] = spread_group(static_cast<const uint8_t*>(weights) + 4 * kGroup);
  });
  const Floats step = spread(by);
  for (int line = 0; line < lines; ++line, codes += kStepGroups, sums += kWords) {
    Sums parts[kStepGroups / ADDED];
    for_each_number<kStepGroups / ADDED>([&](auto i) TQ_INLINED {
      constexpr int kFirst = decltype(i)::value * ADDED;
      Lanes lanes = products_of_values(group[kFirst], codes + kFirst);
      if constexpr (ADDED == 2) {
        lanes = sum_of_lanes(lanes, products_of_values(group[kFirst + 1], codes + kFirst + 1));
      }
      parts[kFirst / ADDED] = words_of(lanes);
    });
    Sums total = sum_of_words(parts[0], parts[1]);
    if constexpr (ADDED == 1) total = sum_of_words(total, sum_of_words(parts[2], parts[3]));
    store_floats(sums, multiply_add(value_sums(total), step, load_floats(sums)));
  }
}

// A row of a block of weights: bytes, then of every kStepRows of them the value of a step.
TQ_INLINE float step_at(const float* operands, int step) { return operands[kBlock / 4 + step]; }

template <int BITS, int PACKED>
void add_values(const RowFormat& format, const uint8_t* rows, int count, const IntegerTable& table,
                const Tables& entries, const float* operands, int queries, float* sums, int pitch,
                tq::PrefetchRange prefetch) {
  alignas(64) Codes codes[tq::kMaxIntegerWidth / kWords * kStepGroups];
  const Rows source(format, rows, count, kStepRows);
  const int all = kSlots<BITS> * lines(format);
  const int steps = (count + kStepRows - 1) / kStepRows;
  PacedPrefetch pace(prefetch, steps * kStepGroups * pieces(format));
  with_added(table, [&](auto added) {
    for (int step = 0; step < steps; ++step) {
      look_up<BITS, PACKED>(format, source, step * kStepRows, entries, pace, codes);
      for (int q = 0; q < queries; ++q) {
        const float* const own = operands + q * tq::kOperandFloats;
        add_step<decltype(added)::value>(codes, all, own + step * kStepGroups,
                                         step_at(own, step) * table.unit, sums + q * pitch);
      }
    }
  });
}

// ---- weights
// The largest of each step of weights that are good, or what its lanes add if that asks for more.
struct Reach {
  Floats of_step[kSteps];
  bool of_both;
  float share;

  TQ_INLINED inline void start(int largest) {
    of_both = lane_vectors(largest) == kLaneVectors;
    share = lane_share_of_weights(largest);
  }
  TQ_INLINED inline void set(int step, Floats a, Floats b) {
    const Floats lanes = larger(lanes_of_weights(a, of_both), lanes_of_weights(b, of_both));
    of_step[step] = larger(larger(a, b), product(lanes, spread(share)));
  }
};

TQ_INLINE void store_steps(const float* weights, const Reach& reach, float* operands) {
  alignas(64) float inverse[kSteps];
  const Floats largest = largest_of_each(reach.of_step);
  store_floats(inverse, inverse_steps(largest, tq::kLargestByteWeight));
  store_floats(operands + kBlock / 4, quotient(largest, spread(tq::kLargestByteWeight)));
  for (int step = 0; step < kSteps; step += 2) {
    Floats x[4];
    for (int i = 0; i < 4; ++i) x[i] = load_floats(weights + step * kStepRows + i * kWords);
    store_rounded(x, inverse[step], inverse[step + 1], operands + step * kStepGroups);
  }
}

// A row of kBlock weights; false, and nothing done, where one is negative or not finite.
TQ_INLINE bool store_row(const float* weights, int largest, float* operands) {
  Reach reach;
  reach.start(largest);
  Bits most = no_bits();
  for (int step = 0; step < kSteps; ++step) {
    const Floats a = load_floats(weights + step * kStepRows);
    const Floats b = load_floats(weights + step * kStepRows + kWords);
    most = larger_bits(larger_bits(most, a), b);
    reach.set(step, a, b);
  }
  const float top = largest_weight(most);
  if (!(top == top)) return false;
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
    Bits most = no_bits();
    const Floats from = spread(top[r]);
    Reach reach[PARTS];
    for (int p = 0; p < PARTS; ++p) reach[p].start(value_scales.largest[p]);
    pace.step();
    for (int step = 0; step < kSteps; step += 2) {
      constexpr int kTogether = 4;
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
          most = larger_bits(most, scaled[i]);
          store_floats(at + p * kBlock + i * kWords, scaled[i]);
        }
        reach[p].set(step, scaled[0], scaled[1]);
        reach[p].set(step + 1, scaled[2], scaled[3]);
      }
    }
    const float total = sum_of_lanes(sum), largest = largest_weight(most);
    const bool are_good = top[r] < __builtin_huge_valf() && top[r] > -__builtin_huge_valf() &&
                          total < __builtin_huge_valf() && largest == largest;
    exponentials[r] = are_good ? total : __builtin_nanf("");
    if (!are_good) continue;
    for (int p = 0; p < PARTS; ++p) {
      store_steps(weights[r][p], reach[p],
                  operands + r * tq::kOperandFloats + p * value_scales.pitch);
    }
    maxima[r] = top[r];
    pace.step();
  }
}

}  // namespace
