// A prefill with integers. Centroids are 8-bit integers times a unit; queries and weights are
// rounded to 32767 steps of the largest of their row or block, which is exact to some 3e-5 of the
// result. Two numbers make a word: the coordinates that two neighbouring slots have at one place,
// or one coordinate of two neighbouring tokens.

namespace {

using tq::IntegerTable;
using tq::PairBlock;

TQ_INLINE Table make_table_of_words(const IntegerTable& table) {
  float entries[16];
  for (int i = 0; i < 16; ++i) {
    const int32_t entry = table.entries[i];
    memcpy(entries + i, &entry, sizeof entry);
  }
  return make_table(entries);
}

TQ_INLINE I lookup_word(const Table& table, I codes) { return bits_of(lookup(table, codes)); }

TQ_INLINE I pair_of(I low, I high) {
  return or_int(and_int(low, set1_int(0xffff)), shift_left<16>(high));
}

// body(Number<bits>) for codes of at most 16 levels in more than one slot.
template <class Body>
TQ_INLINE void with_narrow_bits(int bits, Body&& body) {
  if (bits == 4) return body(Number<4>{});
  if (bits == 3) return body(Number<3>{});
  if (bits == 1) return body(Number<1>{});
  body(Number<2>{});
}

template <int BITS>
void pair_columns_of(const RowFormat& format, const uint8_t* rows, int count, const Table& table,
                     int32_t* keys) {
  for (int t = 0; t < count; t += kLanes) {
    const int some = smaller(kLanes, count - t);
    for_each_chunk(format, [&](auto partial, int at) {
      constexpr int kPartial = decltype(partial)::value;
      for_each_slot<kSlots<BITS> / 2>([&](auto pair) {
        constexpr int kPair = decltype(pair)::value;
        V lanes[kLanes];
        for (int r = 0; r < kLanes; ++r) {
          lanes[r] = zero();
          if (r < some) {
            const uint8_t* const row = rows + (t + r) * format.stride;
            const Chunk<BITS> chunk = load_chunk<BITS, kPartial>(format, row, at);
            lanes[r] = float_of(pair_of(lookup_word(table, codes_of<BITS, 2 * kPair>(chunk)),
                                        lookup_word(table, codes_of<BITS, 2 * kPair + 1>(chunk))));
          }
        }
        transpose_lanes(lanes);
        int32_t* const out =
            keys + static_cast<ptrdiff_t>(kPair * format.padded_slot + at) * kBlock + t;
        for (int j = 0; j < kLanes; ++j) {
          store(reinterpret_cast<float*>(out) + j * kBlock, lanes[j]);
        }
      });
    });
  }
}

template <int BITS>
void pair_rows_of(const RowFormat& format, const uint8_t* rows, int count, const Table& table,
                  int32_t* values) {
  for (int t = 0; t < count; t += 2, values += format.padded) {
    const uint8_t* const first = rows + static_cast<ptrdiff_t>(t) * format.stride;
    const bool is_single = t + 1 == count;
    const uint8_t* const second = is_single ? first : first + format.stride;
    for_each_chunk(format, [&](auto partial, int at) {
      constexpr int kPartial = decltype(partial)::value;
      const Chunk<BITS> low = load_chunk<BITS, kPartial>(format, first, at);
      const Chunk<BITS> high = load_chunk<BITS, kPartial>(format, second, at);
      for_each_slot<kSlots<BITS>>([&](auto slot) {
        constexpr int kSlot = decltype(slot)::value;
        I upper = lookup_word(table, codes_of<BITS, kSlot>(high));
        if (is_single) upper = zero_codes();
        store(reinterpret_cast<float*>(values) + kSlot * format.padded_slot + at,
              float_of(pair_of(lookup_word(table, codes_of<BITS, kSlot>(low)), upper)));
      });
    });
  }
}

void pair_columns(const RowFormat& format, const uint8_t* rows, int count,
                  const IntegerTable& table, int32_t* keys) {
  with_narrow_bits(format.bits, [&](auto bits) {
    pair_columns_of<decltype(bits)::value>(format, rows, count, make_table_of_words(table), keys);
  });
}

void pair_rows(const RowFormat& format, const uint8_t* rows, int count, const IntegerTable& table,
               int32_t* values) {
  with_narrow_bits(format.bits, [&](auto bits) {
    pair_rows_of<decltype(bits)::value>(format, rows, count, make_table_of_words(table), values);
  });
}

// What numbers are multiplied with before they are rounded; zero for nothing but zeros, and numbers
// so small that a step has no inverse, which are zeros beside anything.
TQ_INLINE float inverse_step(float largest) {
  return largest > 1e-30f && largest < __builtin_huge_valf() ? tq::kLargestPairNumber / largest
                                                             : 0.0f;
}
// Not a number where the largest is not finite.
TQ_INLINE float step_of(float largest) {
  return (largest - largest * 0.0f) / tq::kLargestPairNumber;
}

float pack_query(const RowFormat& format, const float* query, int32_t* words) {
  V top = zero(), nonfinite = zero();
  for (int i = 0; i < format.padded; i += kLanes) {
    const V some = load(query + i);
    top = max(abs(some), top);
    nonfinite = fma(some, zero(), nonfinite);
  }
  const float largest = lane_max(top) + lane_sum(nonfinite);  // NaN where one is not finite
  const V inverse = set1(inverse_step(largest));
  for (int slot = 0; slot < format.slots; slot += 2) {
    for (int i = 0; i < format.padded_slot; i += kLanes) {
      const float* const at = query + slot * format.padded_slot + i;
      const I word = pair_of(round_to_int(mul(load(at), inverse)),
                             round_to_int(mul(load(at + format.padded_slot), inverse)));
      store(reinterpret_cast<float*>(words) + slot / 2 * format.padded_slot + i, float_of(word));
    }
  }
  return step_of(largest);
}

// Weights [from, to) to 16-bit numbers; returns the step.
TQ_INLINE float pack_weights(const float* weights, int from, int to, int16_t* numbers) {
  V top = zero(), nonfinite = zero();
  for (int t = from; t < to; t += kLanes) {
    const V some = load(weights + t);
    top = max(abs(some), top);
    nonfinite = fma(some, zero(), nonfinite);
  }
  const float largest = lane_max(top) + lane_sum(nonfinite);
  const V inverse = set1(inverse_step(largest));
  for (int t = from; t < to; t += kLanes) {
    store_words(numbers + t, round_to_int(mul(load(weights + t), inverse)));
  }
  return step_of(largest);
}

template <int ROWS>
void attend_pair_strip(const PairBlock& block, const int32_t* query, const float* query_steps,
                       const int* low, const int* high, float* max_scores, float* weights,
                       float* sums) {
  const Seen seen = find_seen<ROWS>(low, high);
  if (seen.first >= seen.last) return;
  alignas(64) float scores[ROWS * kPrefillBlock];
  alignas(64) int16_t numbers[ROWS * kPrefillBlock];
  float steps[ROWS];
  for (int at = 0; at < kPrefillBlock; at += kBlock) {
    const int begin = seen.from > at ? seen.from : at, end = smaller(seen.to, at + kBlock);
    if (begin >= end) continue;
    const int32_t* const keys = block.keys + static_cast<ptrdiff_t>(at) * block.key_pairs;
    block.multiply(query, block.key_pairs, keys + (begin - at), kBlock, scores + begin,
                   kPrefillBlock, ROWS, end - begin, block.key_pairs, query_steps, false);
  }
  for (int r = 0; r < ROWS; ++r) {
    float* const row = scores + r * kPrefillBlock;
    softmax_row(row, block.key_scales, block.value_scales, seen.from, seen.to, low[r], high[r],
                max_scores + r, weights + r, sums + static_cast<ptrdiff_t>(r) * block.value_width,
                block.value_width);
    steps[r] = pack_weights(row, seen.from, seen.to, numbers + r * kPrefillBlock);
  }
  block.multiply(reinterpret_cast<const int32_t*>(numbers + seen.from), kPrefillBlock / 2,
                 block.values + static_cast<ptrdiff_t>(seen.from / 2) * block.value_width,
                 block.value_width, sums, block.value_width, ROWS, block.value_width,
                 (seen.last - seen.from + 1) / 2, steps, true);
}

void attend_pair_block(const PairBlock& block, const int32_t* query, const float* steps, int rows,
                       const int* low, const int* high, float* max_scores, float* weights,
                       float* sums) {
  int r = 0;
  const auto strip = [&](auto count) {
    constexpr int kCount = decltype(count)::value;
    attend_pair_strip<kCount>(block, query + static_cast<ptrdiff_t>(r) * block.key_pairs, steps + r,
                              low + r, high + r, max_scores + r, weights + r,
                              sums + static_cast<ptrdiff_t>(r) * block.value_width);
    r += kCount;
  };
  while (r + kTileM <= rows) strip(Number<kTileM>{});
  while (r < rows) strip(Number<1>{});
}

constexpr tq::PairKernels make_pair_kernels() {
  tq::PairKernels all{};
  all.decode_columns = pair_columns;
  all.decode_rows = pair_rows;
  all.pack_query = pack_query;
  all.attend_block = attend_pair_block;
  return all;
}

constexpr tq::PairKernels kPairKernels = make_pair_kernels();
constexpr const tq::PairKernels* kPairs = &kPairKernels;

}  // namespace
