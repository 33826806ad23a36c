// Weights and sums of values in 32 bits: products of codes with weights are added in registers, in passes
// over the rows. Included by integer.inl.

namespace {

constexpr int kStepRows = tq::kByteStepRows;
constexpr int kStepVectors = kStepRows / kWords;
constexpr int kSteps = kBlock / kStepRows;
constexpr int kGroups = kBlock / 4;  // of the weights of a block
constexpr int kGroupFloats = sizeof(Group) / sizeof(float);
static_assert(kGroups * kGroupFloats + 2 * kSteps <= tq::kOperandFloats);

// ---- keys
// Sums of 32 bits hold the products of any query and are made one slot at a time.
TQ_INLINE float reach_of_query(const RowFormat&, const IntegerTable&, const float*, int) {
  return 0.0f;
}
template <class Body>
TQ_INLINE void with_added(const IntegerTable&, Body&& body) {
  body(Number<1>{});
}
TQ_INLINE void add_products_of_keys(Sums* sums, const Codes (&codes)[1][kTileVectors],
                                    const float* factors, const float*) {
  const Factors by = load_factors(factors);
  for_each_number<kTileVectors>([&](auto i) TQ_INLINED {
    add_key_products(sums[decltype(i)::value], codes[0][decltype(i)::value], by);
  });
}

// ---- values

// A row of a block of weights: groups, then of every kStepRows of them the value of a step, then what
// first_value_sums wants.
TQ_INLINE const Group* groups_of(const float* operands) {
  return reinterpret_cast<const Group*>(operands);
}
TQ_INLINE float step_at(const float* operands, int step) {
  return operands[kGroups * kGroupFloats + step];
}
TQ_INLINE Sums first_sums_at(const float* operands, int step) {
  int32_t total;
  memcpy(&total, operands + kGroups * kGroupFloats + kSteps + step, sizeof total);
  return first_value_sums(total);
}

// The most slots that may be taken together: a power of two, whose sums are at most kMostSums.
constexpr int slots_together(int slots, int sums_of_a_slot) {
  int together = 1;
  while (2 * together <= slots && 2 * together * sums_of_a_slot <= kMostSums) together *= 2;
  return together;
}

// How values are cut into passes that keep their sums in registers: slots and halves of vectors of
// rows that a pass takes together.
template <int BITS, int QUERIES, int PACKED>
struct Passes {
  static constexpr int kHalves = PACKED == 1 && QUERIES > kDeepQueries ? 2 : 1;
  static constexpr int kLines = PACKED == 4 ? 1 : (PACKED == 1 && kHalves == 1 ? 4 : 2);
  static constexpr int kTogether = slots_together(kSlots<BITS>, QUERIES* kLines);
  static constexpr int kParts = kSlots<BITS> / kTogether;
  static constexpr int kSums = QUERIES * kTogether * kLines;
};

template <int BITS, int QUERIES, int PACKED, int HALF, int FIRST>
TQ_INLINE void accumulate_pass(const RowFormat& format, const Rows& rows, int count, int piece,
                               const Tables& tables, const float* operands, float unit,
                               PacedPrefetch& pace, float* sums, int pitch, int next) {
  using Cut = Passes<BITS, QUERIES, PACKED>;
  constexpr int kTogether = Cut::kTogether, kLines = Cut::kLines;
  const float* weights = operands;
  int t = 0;
  for (int step = 0; t < count; ++step) {
    const int last = smaller(count, (step + 1) * kStepRows);
    Sums total[Cut::kSums];
    for_each_number<Cut::kSums>([&](auto i) TQ_INLINED {
      constexpr int kQuery = decltype(i)::value / (kTogether * kLines);
      total[decltype(i)::value] = first_sums_at(operands + kQuery * tq::kOperandFloats, step);
    });
    // Of the cache, then of the copies.
    while (t < last) {
      const ptrdiff_t stride = rows.stride(t);
      const uint8_t* at[kSegments<BITS>];
      for_each_number<kSegments<BITS>>([&](auto segment) TQ_INLINED {
        constexpr int kSegment = decltype(segment)::value;
        at[kSegment] = rows.row(format, kSegment, t) + piece * (kBytes / PACKED);
      });
      for (const int end = t < rows.in_cache ? smaller(rows.in_cache, last) : last; t < end;
           t += 4) {
        Bytes from[kSegments<BITS>][4];
        for_each_number<kSegments<BITS>>([&](auto segment) TQ_INLINED {
          constexpr int kSegment = decltype(segment)::value;
          if constexpr (kSegment == 0) pace.step();
          load_lines<PACKED, HALF, kLines == 4>(at[kSegment], stride, from[kSegment]);
          at[kSegment] += 4 * stride;
        });
        Codes codes[kTogether * kLines];
        for_each_number<kTogether>([&](auto s) TQ_INLINED {
          for_each_number<kLines>([&](auto line) TQ_INLINED {
            constexpr int kAt = decltype(s)::value, kLine = decltype(line)::value;
            constexpr int kSlot = slot_at<BITS>(FIRST + kAt);
            codes[kAt * kLines + kLine] = codes_of<BITS, kSlot>(
                tables, from[kSlot % kLowSegments<BITS>][kLine], from[kSegments<BITS> - 1][kLine]);
          });
        });
        for_each_number<QUERIES>([&](auto query) TQ_INLINED {
          constexpr int kQuery = decltype(query)::value;
          const Factors by = spread_factors(*groups_of(weights + kQuery * tq::kOperandFloats));
          for_each_number<kTogether * kLines>([&](auto i) TQ_INLINED {
            constexpr int kAt = decltype(i)::value;
            add_value_products(total[kQuery * kTogether * kLines + kAt], codes[kAt], by);
          });
        });
        weights += kGroupFloats;
      }
    }
    for_each_number<QUERIES>([&](auto query) TQ_INLINED {
      constexpr int kQuery = decltype(query)::value;
      const Floats by = spread(step_at(operands + kQuery * tq::kOperandFloats, step) * unit);
      for_each_number<kTogether * kLines>([&](auto i) TQ_INLINED {
        constexpr int kAt = decltype(i)::value;
        float* const at = sums + kQuery * pitch + slot_at<BITS>(FIRST + kAt / kLines) * next +
                          (HALF * kLines + kAt % kLines) * kWords;
        store_floats(at, multiply_add(value_sums(total[kQuery * kTogether * kLines + kAt]), by,
                                      load_floats(at)));
      });
    });
  }
}

template <int BITS, int QUERIES, int PACKED>
void accumulate_lines(const RowFormat& format, const uint8_t* rows, int count, const Tables& tables,
                      const float* operands, float unit, tq::PrefetchRange prefetch, float* sums,
                      int pitch) {
  using Cut = Passes<BITS, QUERIES, PACKED>;
  const int all = pieces(format);
  PacedPrefetch pace(prefetch, all * Cut::kHalves * Cut::kParts * ((count + 3) / 4));
  const Rows source(format, rows, count, 4);
  for (int piece = 0; piece < all; ++piece) {
    for_each_number<Cut::kHalves>([&](auto half) TQ_INLINED {
      for_each_number<Cut::kParts>([&](auto part) TQ_INLINED {
        accumulate_pass<BITS, QUERIES, PACKED, decltype(half)::value,
                        decltype(part)::value * Cut::kTogether>(
            format, source, count, piece, tables, operands, unit, pace,
            sums + piece * piece_lines(format) * kWords, pitch, all * piece_lines(format) * kWords);
      });
    });
  }
}

// ---- values of narrow rows
constexpr int kSideRows = kBytes / 4;  // tokens of a line
constexpr int kMostLines = 10;  // of five segments

// All lines of a block: [token / kSideRows][segment][line of a slot].
template <class SIDES>
struct NarrowRows {
  alignas(64) uint8_t of_block[kBlock / kSideRows][kMostLines][kBytes];

  NarrowRows(const RowFormat& format, const uint8_t* rows, int count, tq::PrefetchRange prefetch) {
    const int segments = segments_of(format);
    const int bytes = segments * format.slot_size;
    const int chunks = (bytes + 15) / 16, of_slot = narrow_lines(format);
    const uintptr_t codes_end =
        reinterpret_cast<uintptr_t>(rows + (count - 1) * format.stride + bytes);
    const uintptr_t end = reinterpret_cast<uintptr_t>(format.end);
    const uintptr_t limit = end > codes_end ? end : codes_end;
    PacedPrefetch pace(prefetch, (count + kSideRows - 1) / kSideRows);
    for (int t = 0; t < count; t += kSideRows) {
      pace.step();
      constexpr int kCopied = 48;  // bytes of a row
      uint8_t copies[kSideRows * kCopied];
      const uint8_t* from = rows + static_cast<ptrdiff_t>(t) * format.stride;
      ptrdiff_t stride = format.stride;
      const uintptr_t reach = reinterpret_cast<uintptr_t>(from) +
                              static_cast<uintptr_t>((kSideRows - 1) * stride + 16 * chunks);
      if (t + kSideRows > count || reach > limit) {
        memset(copies, 0, sizeof copies);
        for (int i = 0; i < smaller(kSideRows, count - t); ++i) {
          memcpy(copies + i * kCopied, from + i * stride, static_cast<size_t>(bytes));
        }
        from = copies;
        stride = kCopied;
      }
      Bytes words[12];
      for (int chunk = 0; chunk < chunks; ++chunk) {
        load_words<kBytes / 16>(from + 16 * chunk, stride, words + 4 * chunk);
      }
      for (int i = 0; i < segments; ++i) {
        for (int line = 0; line < of_slot; ++line) {
          const int at = i * format.slot_size + 4 * line;
          const Bytes own = SIDES::moved(SIDES::transposed(words[at / 4]), at % 4);
          memcpy(of_block[t / kSideRows][i * of_slot + line], &own, sizeof own);
        }
      }
    }
  }
};

template <int BITS, int QUERIES, int FIRST_SLOT, int TOGETHER, class SIDES>
TQ_INLINE void accumulate_narrow_pass(const NarrowRows<SIDES>& rows, int count, int line,
                                      int of_slot, const Tables& tables, const float* operands,
                                      float unit, float* sums, int pitch) {
  constexpr int kSides = kStepRows / kSideRows;  // of a step
  for (int step = 0; step * kStepRows < count; ++step) {
    Sums total[QUERIES * TOGETHER];
    for_each_number<QUERIES * TOGETHER>(
        [&](auto i) TQ_INLINED { total[decltype(i)::value] = zero_sums(); });
    for (int side = step * kSides; side < (step + 1) * kSides && side * kSideRows < count; ++side) {
      Bytes segment[kSegments<BITS>];
      for_each_number<kSegments<BITS>>([&](auto i) TQ_INLINED {
        constexpr int kSegment = decltype(i)::value;
        memcpy(&segment[kSegment], rows.of_block[side][kSegment * of_slot + line], sizeof(Bytes));
      });
      Codes codes[TOGETHER];
      for_each_number<TOGETHER>([&](auto slot) TQ_INLINED {
        constexpr int kSlot = decltype(slot)::value;
        codes[kSlot] = codes_of<BITS, FIRST_SLOT + kSlot>(
            tables, segment[(FIRST_SLOT + kSlot) % kLowSegments<BITS>],
            segment[kSegments<BITS> - 1]);
      });
      for_each_number<QUERIES>([&](auto query) TQ_INLINED {
        constexpr int kQuery = decltype(query)::value;
        const Factors by = SIDES::spread(groups_of(operands + kQuery * tq::kOperandFloats) +
                                         side * (kSideRows / 4));
        for_each_number<TOGETHER>([&](auto slot) TQ_INLINED {
          constexpr int kSlot = decltype(slot)::value;
          add_value_products(total[kQuery * TOGETHER + kSlot], codes[kSlot], by);
        });
      });
    }
    for_each_number<QUERIES>([&](auto query) TQ_INLINED {
      constexpr int kQuery = decltype(query)::value;
      const float by = step_at(operands + kQuery * tq::kOperandFloats, step) * unit;
      for_each_number<TOGETHER / 4>([&](auto four) TQ_INLINED {
        constexpr int kSlot = 4 * decltype(four)::value, kAt = kQuery * TOGETHER + kSlot;
        SIDES::add_to(total[kAt], total[kAt + 1], total[kAt + 2], total[kAt + 3], by,
                      sums + kQuery * pitch + (line * kSlots<BITS> + FIRST_SLOT + kSlot) * 4);
      });
    });
  }
}

template <int BITS, int QUERIES, class SIDES = Sides>
void accumulate_narrow(const RowFormat& format, const uint8_t* rows, int count,
                       const Tables& tables, const float* operands, float unit,
                       tq::PrefetchRange prefetch, float* sums, int pitch) {
  constexpr int kTogether = slots_together(kSlots<BITS>, QUERIES);
  static_assert(kTogether % 4 == 0);
  const NarrowRows<SIDES> source(format, rows, count, prefetch);
  for (int line = 0; line < narrow_lines(format); ++line) {
    for_each_number<kSlots<BITS> / kTogether>([&](auto part) TQ_INLINED {
      accumulate_narrow_pass<BITS, QUERIES, decltype(part)::value * kTogether, kTogether, SIDES>(
          source, count, line, narrow_lines(format), tables, operands, unit, sums, pitch);
    });
  }
}

template <int BITS, int PACKED>
void add_values(const RowFormat& format, const uint8_t* rows, int count, const IntegerTable& table,
                const Tables& entries, const float* operands, int queries, float* sums, int pitch,
                tq::PrefetchRange prefetch) {
  for_each_share(queries, [&](int first, int some) {
    const float* const own = operands + first * tq::kOperandFloats;
    float* const to = sums + first * pitch;
    const tq::PrefetchRange later = first == 0 ? prefetch : tq::PrefetchRange{};
    with_queries(some, [&](auto share) {
      constexpr int kQueries = decltype(share)::value;
      if constexpr (Sides::kIsOn && (BITS == 2 || kSegments<BITS> > 1)) {
        if (is_narrow(format)) {
          return accumulate_narrow<BITS, kQueries>(format, rows, count, entries, own, table.unit,
                                                   later, to, pitch);
        }
      }
      accumulate_lines<BITS, kQueries, PACKED>(format, rows, count, entries, own, table.unit, later,
                                               to, pitch);
    });
  });
}

// ---- weights
// A step of a row of weights that are good; `largest` is the largest of them.
TQ_INLINE void store_step(const float* weights, float largest, int step, float* operands) {
  Floats x[kStepVectors];
  for (int i = 0; i < kStepVectors; ++i) x[i] = load_floats(weights + i * kWords);
  // Below this a step has no inverse; such weights are zeros beside anything.
  const float inverse = largest > 1e-30f ? tq::kLargestByteWeight / largest : 0.0f;
  const int32_t total = store_weights<kStepVectors>(
      x, inverse, reinterpret_cast<Group*>(operands + step * (kStepRows / 4) * kGroupFloats));
  operands[kGroups * kGroupFloats + step] = largest / tq::kLargestByteWeight;
  memcpy(operands + kGroups * kGroupFloats + kSteps + step, &total, sizeof total);
}

// A row of kBlock weights; false, and nothing done, where one is negative or not finite.
TQ_INLINE bool store_row(const float* weights, int, float* operands) {
  float largest[kSteps];
  for (int step = 0; step < kSteps; ++step) {
    Bits most = no_bits();
    for (int i = 0; i < kStepVectors; ++i) {
      most = larger_bits(most, load_floats(weights + step * kStepRows + i * kWords));
    }
    largest[step] = largest_weight(most);
    if (!(largest[step] == largest[step])) return false;
  }
  for (int step = 0; step < kSteps; ++step) {
    store_step(weights + step * kStepRows, largest[step], step, operands);
  }
  return true;
}

// Rows go through the three phases together: what one row waits for is another's time.
constexpr int kSoftmaxRows = 8;

template <int PARTS>
TQ_INLINE void softmax_rows(const float* scores, int rows, const float* key_scales,
                            const tq::PartScales& value_scales, float* maxima, float* exponentials,
                            float* operands, PacedPrefetch& pace) {
  alignas(64) float weights[kSoftmaxRows][PARTS][kBlock];
  float top[kSoftmaxRows], largest[kSoftmaxRows][PARTS][kSteps];
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
    pace.step();
    for (int step = 0; step < kSteps; ++step) {
      Bits most[PARTS];
      for (int p = 0; p < PARTS; ++p) most[p] = no_bits();
      for (int i = step * kStepVectors; i < (step + 1) * kStepVectors; ++i) {
        const Floats weight =
            exponential(difference(load_floats(weights[r][0] + i * kWords), from));
        sum = total_of_floats(sum, weight);
        for (int p = 0; p < PARTS; ++p) {
          const Floats scaled =
              product(weight, load_floats(value_scales.scales + p * kBlock + i * kWords));
          most[p] = larger_bits(most[p], scaled);
          store_floats(weights[r][p] + i * kWords, scaled);
        }
      }
      for (int p = 0; p < PARTS; ++p) largest[r][p][step] = largest_weight(most[p]);
    }
    exponentials[r] = sum_of_lanes(sum);
  }
  for (int r = 0; r < rows; ++r) {
    bool are_good = top[r] < __builtin_huge_valf() && top[r] > -__builtin_huge_valf() &&
                    exponentials[r] < __builtin_huge_valf();
    for (int i = 0; i < PARTS * kSteps; ++i) {
      const float one = largest[r][i / kSteps][i % kSteps];
      are_good = are_good && one == one;
    }
    if (!are_good) {
      exponentials[r] = __builtin_nanf("");
      continue;
    }
    for (int i = 0; i < PARTS * kSteps; ++i) {
      const int p = i / kSteps, step = i % kSteps;
      store_step(weights[r][p] + step * kStepRows, largest[r][p][step], step,
                 operands + r * tq::kOperandFloats + p * value_scales.pitch);
    }
    maxima[r] = top[r];
    pace.step();
  }
}

}  // namespace
