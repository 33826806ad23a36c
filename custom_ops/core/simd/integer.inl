// Products with integers, in terms of the words of one vec_int_*.h and of one operands_*.h: how queries
// and weights are held.
//
// Codes are looked up as 8-bit integers; queries and weights are rounded to steps, of 8 bits
// (of the largest of a query, or of kStepRows weights), and every product and sum is exact.
// Four neighbouring bytes make a word, and a word's four products are added at once:
//   score_rows       a word: four coordinates of one token; every quarter of a vector (16 bytes) is
//                    transposed for itself, so that its words are tokens, and the quarters of a row
//                    are added at the end
//   accumulate_rows  a word: one coordinate of four tokens; rows are interleaved
// A row's planes come in segments of slot_size bytes (core/kernels.h): one; or low ones and, behind
// them, the one-bit plane: two low ones for 3 bits, which have the even and the odd slots, four for 5
// bits, of which each has two slots.

namespace {

using tq::IntegerTable;
using tq::kBlock;
using tq::kCacheLine;
using tq::RowFormat;

constexpr int kStepRows = tq::kByteStepRows;
constexpr int kGroups = kBlock / 4;  // of the weights of a block
constexpr int kSteps = kBlock / kStepRows;
constexpr int kGroupFloats = sizeof(Group) / sizeof(float);
constexpr int kFactorFloats = sizeof(Factors) / sizeof(float);
static_assert(kGroups * kGroupFloats + 2 * kSteps <= tq::kOperandFloats);
constexpr int kMaxCopies = 576 * kBlock;  // bytes of copied rows

TQ_INLINE int smaller(int a, int b) { return a < b ? a : b; }
constexpr int round_up(int value, int multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

template <int N>
struct Number {
  static constexpr int value = N;
};

// body(Number<0>), ..., body(Number<LAST - 1>)
template <int LAST, int FIRST = 0, class Body>
TQ_INLINE void for_each_number(Body&& body) {
  if constexpr (FIRST < LAST) {
    body(Number<FIRST>{});
    for_each_number<LAST, FIRST + 1>(body);
  }
}

// ---- layout
template <int BITS>
constexpr int kSlots = BITS == 8 ? 1 : (BITS == 4 ? 2 : (BITS == 2 ? 4 : 8));
template <int BITS>
constexpr int kSegments = BITS == 3 || BITS == 5 ? BITS : 1;
template <int BITS>
constexpr int kLowSegments = BITS == 3 || BITS == 5 ? BITS - 1 : 1;
TQ_INLINE int segments_of(const RowFormat& format) {
  return format.bits == 3 || format.bits == 5 ? format.bits : 1;
}
// Stages in which slots are taken. Those of 5 bits have a low segment each, for which there are
// registers; with 3 bits two slots of different segments share what is done to the one-bit plane.
template <int BITS>
constexpr int kStages = BITS == 5 ? 4 : 1;
// Slots in the order of their stages.
template <int BITS>
constexpr int slot_at(int place) {
  const int of_stage = kSlots<BITS> / kStages<BITS>;
  return place % of_stage * kStages<BITS> + place / of_stage;
}

TQ_INLINE int segment_offset(const RowFormat& format, int segment) {
  const bool is_high = segment > 0 && segment == segments_of(format) - 1;
  return is_high ? format.high_plane : segment * format.slot_size;
}
// Rows of a segment side by side in a vector: as many as makes a piece of a row of 64 or 128
// coordinates fill its share. Segments are cut into pieces of kBytes / packed bytes.
TQ_INLINE int packed(const RowFormat& format) {
  if (format.bits == 8) return 1;
  if (format.bits % 2 == 1 || format.slot_size <= 16) return kBytes / 16;
  return kBytes >= 64 && (format.bits == 2 || format.slot_size <= 32) ? 2 : 1;
}
TQ_INLINE int piece_bytes(const RowFormat& format) { return kBytes / packed(format); }
TQ_INLINE int pieces(const RowFormat& format) {
  return (format.slot_size + piece_bytes(format) - 1) / piece_bytes(format);
}
// Vectors of words that the interleaved rows of a piece fill.
TQ_INLINE int piece_lines(const RowFormat& format) { return 4 / packed(format); }
TQ_INLINE int lines(const RowFormat& format) { return pieces(format) * piece_lines(format); }

// body(Number<BITS>, Number<packed>) for packed from LEAST on.
template <int BITS, int LEAST, class Body>
TQ_INLINE void with_packed(const RowFormat& format, Body&& body) {
  if constexpr (LEAST < kBytes / 16) {
    if (packed(format) > LEAST) return with_packed<BITS, 2 * LEAST>(format, body);
  }
  body(Number<BITS>{}, Number<LEAST>{});
}

// body(Number<bits>, Number<packed>)
template <class Body>
TQ_INLINE void with_format(const RowFormat& format, Body&& body) {
  switch (format.bits) {
    case 4:
      return with_packed<4, 1>(format, body);
    case 3:
      return body(Number<3>{}, Number<kBytes / 16>{});
    case 5:
      return body(Number<5>{}, Number<kBytes / 16>{});
    case 1:
      return body(Number<1>{}, Number<kBytes / 16>{});
    case 8:
      return body(Number<8>{}, Number<1>{});
    default:
      return with_packed<2, (kBytes >= 64 ? 2 : 1)>(format, body);
  }
}

// ---- rows to words
// Rows that the products may read in whole tiles of whole pieces: those of the cache, where what lies
// behind their codes may be read, and copies of the last ones, with zeros behind them. What is no
// code is multiplied with zero, or its sums are not looked at.
struct Rows {
  const uint8_t* cache;
  ptrdiff_t cache_stride;
  int in_cache;  // rows from here on are copies
  ptrdiff_t copy_stride, copied_segment;
  alignas(64) uint8_t copies[kMaxCopies];

  Rows(const RowFormat& format, const uint8_t* rows, int count, int tile)
      : cache(rows), cache_stride(format.stride), in_cache(count) {
    const int last = segment_offset(format, segments_of(format) - 1);
    const uintptr_t begin = reinterpret_cast<uintptr_t>(rows);
    const uintptr_t stride_ = static_cast<uintptr_t>(format.stride);
    const uintptr_t codes_end = begin + static_cast<uintptr_t>(count - 1) * stride_ +
                                static_cast<uintptr_t>(last + format.slot_size);
    const uintptr_t end = reinterpret_cast<uintptr_t>(format.end);
    const uintptr_t limit = end > codes_end ? end : codes_end;
    const int row_end = last + pieces(format) * piece_bytes(format);
    const uintptr_t reach = static_cast<uintptr_t>(row_end);
    const auto may_read = [&](int several) TQ_INLINED {
      return begin + static_cast<uintptr_t>(several - 1) * stride_ + reach <= limit;
    };
    if (count % tile == 0 && may_read(count)) return;
    in_cache = count / tile * tile;
    while (in_cache > 0 && !may_read(in_cache)) in_cache -= tile;
    copy(format, count, round_up(count, tile));
  }

  void copy(const RowFormat& format, int count, int padded) {
    copy_stride = static_cast<ptrdiff_t>(pieces(format)) * piece_bytes(format);
    copied_segment = (padded - in_cache) * copy_stride;
    const int segments = segments_of(format);
    memset(copies, 0, static_cast<size_t>(segments * copied_segment));
    for (int i = 0; i < segments; ++i) {
      for (int t = in_cache; t < count; ++t) {
        memcpy(copies + i * copied_segment + (t - in_cache) * copy_stride,
               cache + t * cache_stride + segment_offset(format, i),
               static_cast<size_t>(format.slot_size));
      }
    }
  }

  inline const uint8_t* row(const RowFormat& format, int segment, int t) const {
    return t < in_cache ? cache + t * cache_stride + segment_offset(format, segment)
                        : copies + segment * copied_segment + (t - in_cache) * copy_stride;
  }
  inline ptrdiff_t stride(int t) const { return t < in_cache ? cache_stride : copy_stride; }
};

// Prefetches the lines of a range in equal steps, of which there are `steps`. A prefetch never faults.
struct PacedPrefetch {
  uintptr_t at;
  uintptr_t spacing;  // at most a line
  int count;  // of a step

  PacedPrefetch(tq::PrefetchRange prefetch, int steps)
      : at(reinterpret_cast<uintptr_t>(prefetch.begin)), spacing(0), count(0) {
    if (prefetch.bytes <= 0 || steps <= 0) return;
    const ptrdiff_t each = (prefetch.bytes + steps - 1) / steps;
    count = static_cast<int>((each + kCacheLine - 1) / kCacheLine);
    spacing = static_cast<uintptr_t>((each + count - 1) / count);
  }
  inline void step() {
    for (int i = 0; i < count; ++i, at += spacing) prefetch(reinterpret_cast<const void*>(at));
  }
};

// words[w]: word w of the quarters of rows 0 .. 3, PACKED > 1: of rows 4 .. 7 behind them, ...
template <int PACKED>
TQ_INLINE void load_words(const uint8_t* rows, ptrdiff_t stride, Bytes* words) {
  for_each_number<4>([&](auto i) TQ_INLINED {
    constexpr int kRow = decltype(i)::value;
    const auto load = [&](int row) TQ_INLINED { return load_row<PACKED>(rows + row * stride); };
    if constexpr (PACKED == 1) {
      words[kRow] = load(kRow);
    } else if constexpr (PACKED == 2) {
      words[kRow] = pack(load(kRow), load(kRow + 4));
    } else {
      words[kRow] = pack(load(kRow), load(kRow + 4), load(kRow + 8), load(kRow + 12));
    }
  });
  transpose_words(words);
}

// lines[j]: bytes of rows 0 .. 3 side by side; of one half, or of both.
template <int PACKED, int HALF, bool BOTH>
TQ_INLINE void load_lines(const uint8_t* rows, ptrdiff_t stride, Bytes* lines) {
  const auto load = [&](int row) TQ_INLINED { return load_row<PACKED>(rows + row * stride); };
  const auto a = load(0), b = load(1), c = load(2), d = load(3);
  interleave<HALF>(a, b, c, d, lines);
  if constexpr (BOTH) interleave<1>(a, b, c, d, lines + 2);
}

template <int N>
TQ_INLINE Bytes shift_by(Bytes b) {  // to the left
  if constexpr (N > 0) {
    return shift_left<N>(b);
  } else {
    return shift_right<-N>(b);
  }
}

struct Tables {
  Table first, second;
};
// Of the makers of a level. The second one is that of odd slots of 3 bits, which looks at bits 0, 1
// and 3, or that of the upper half of the codes of 5 bits.
template <class Make>
TQ_INLINE Tables make_tables(const RowFormat& format, const int8_t* entries, Make make) {
  int8_t second[16];
  for (int i = 0; i < 16; ++i) {
    second[i] = entries[format.bits == 3 ? (i & 3) | (i >> 3) << 2 : 16 + i];
  }
  return {make(entries), make(second)};
}
// Of the bytes of the low segment that has the slot, and of the one-bit plane, if there is one.
template <int BITS, int SLOT>
TQ_INLINE Codes codes_of(const Tables& tables, Bytes low, Bytes high) {
  if constexpr (BITS == 3) {
    // The third bits of a pair of slots are neighbours: bit 2 is that of the even one, bit 3 that
    // of the odd one. The table of odd slots passes over bit 2.
    constexpr int kPair = SLOT / 2;
    const Bytes bits = shift_by<2 - 2 * kPair>(high);
    return as_codes(found(SLOT % 2 == 1 ? tables.second : tables.first,
                          two_bits_of(shift_right<2 * kPair>(low), bits)));
  } else if constexpr (BITS == 5) {
    return as_codes(found_of_two<SLOT>(tables.first, tables.second,
                                       nibbles(shift_right<4 * (SLOT / 4)>(low)), high));
  } else {
    return as_codes(found(tables.first, nibbles(shift_right<BITS == 8 ? 0 : BITS * SLOT>(low))));
  }
}

// ---- queries
// A prepared query row: factors[piece][slot][w], as the words of the keys lie, then the value of a
// step and the sum of the steps.
struct Ending {
  float step;
  int32_t total;
};

TQ_INLINE int factor_count(const RowFormat& format) { return pieces(format) * format.slots * 4; }
int query_floats(const RowFormat& format) { return factor_count(format) * kFactorFloats + kWords; }
TQ_INLINE Ending ending_at(const RowFormat& format, const float* prepared) {
  Ending ending;
  memcpy(&ending, prepared + factor_count(format) * kFactorFloats, sizeof ending);
  return ending;
}

// The compiler may not compute the addresses of all factors beforehand: it has no registers for them.
TQ_INLINE const float* keep_pointer(const float* p) {
#if defined(__GNUC__)
  __asm__("" : "+r"(p));
#endif
  return p;
}

// The largest magnitude of n numbers, n a multiple of the words; not finite if one is not.
TQ_INLINE float largest_of(const float* x, int n) {
  Floats largest = spread(0.0f);
  bool finite = true;
  for (int i = 0; i < n; i += kWords) {
    const Floats some = load_floats(x + i);
    finite = finite && all_finite(some);
    largest = largest_magnitude(largest, some);
  }
  return finite ? largest_lane(largest) : __builtin_huge_valf();
}

// What is not finite becomes zeros with a step that is not a number.
TQ_INLINE Ending quantise_operands(const float* x, int n, Group* groups) {
  const float largest = largest_of(x, n);
  const bool finite = largest < __builtin_huge_valf();
  // Below this a step has no inverse; such numbers are zeros beside anything.
  const float inverse = finite && largest > 1e-30f ? tq::kLargestByte / largest : 0.0f;
  Total total = zero_total();
  float zeros[kWords] = {};
  for (int i = 0; i < n; i += kWords) {
    total = store_groups(finite ? x + i : zeros, inverse, groups + i / 4, total);
  }
  return {finite ? largest / tq::kLargestByte : __builtin_nanf(""), total_of(total)};
}

void prepare_query(const RowFormat& format, const float* natural, float* prepared) {
  const int words = (format.slot_size + 3) / 4;  // of a slot
  const int padded = round_up(format.slots * words * 4, kWords);
  float slotted[tq::kMaxIntegerWidth];
  Group groups[tq::kMaxIntegerWidth / 4];
  if (format.slot_size % 4 == 0) {
    memcpy(slotted, natural, static_cast<size_t>(format.head_size) * sizeof(float));
    for (int i = format.head_size; i < padded; ++i) slotted[i] = 0.0f;
  } else {
    for (int i = 0; i < padded; ++i) slotted[i] = 0.0f;
    for (int i = 0; i < format.head_size; ++i) {
      slotted[i / format.slot_size * 4 * words + i % format.slot_size] = natural[i];
    }
  }
  const Ending ending = quantise_operands(slotted, padded, groups);
  const int quarters = kBytes / 16 / packed(format);
  for (int piece = 0; piece < pieces(format); ++piece) {
    for (int slot = 0; slot < format.slots; ++slot) {
      for (int w = 0; w < 4; ++w) {
        Group all[kWords] = {};
        for (int lane = 0; lane < kWords / 4; ++lane) {  // `quarters` is a power of two
          const int word = piece * piece_bytes(format) / 4 + (lane & (quarters - 1)) * 4 + w;
          if (word >= words) continue;
          for (int i = 0; i < 4; ++i) all[4 * lane + i] = groups[slot * words + word];
        }
        store_factors(all, prepared + ((piece * format.slots + slot) * 4 + w) * kFactorFloats);
      }
    }
  }
  memcpy(prepared + factor_count(format) * kFactorFloats, &ending, sizeof ending);
}

// Loops over registers go by for_each_number: with indices that are constants from the start the
// compiler keeps the sums in registers.

// ---- scores
// Sums of words of kTileVectors vectors: those of query q from kTileVectors * q on.
template <int BITS, int QUERIES, int PACKED>
TQ_INLINE void sum_tile(const RowFormat& format, const Rows& rows, int t, int all,
                        const Tables& tables, const float* prepared, int pitch, PacedPrefetch& pace,
                        Sums* sums) {
  constexpr int kTokens = 4 * PACKED;
  constexpr int kPiece = kBytes / PACKED;
  for_each_number<kTileVectors * QUERIES>(
      [&](auto i) TQ_INLINED { sums[decltype(i)::value] = zero_sums(); });
  const ptrdiff_t stride = rows.stride(t);
  const uint8_t* segments[kSegments<BITS>];
  for_each_number<kSegments<BITS>>([&](auto i) TQ_INLINED {
    segments[decltype(i)::value] = rows.row(format, decltype(i)::value, t);
  });
  pace.step();
  // Of rows of 16 bytes, words behind their last code.
  const int needed = PACKED > 1 && kPiece == 16 ? (format.slot_size + 3) / 4 : 4 * all;
  for (int piece = 0; piece < all; ++piece) {
    const auto load_segment = [&](const uint8_t* segment, auto words) TQ_INLINED {
      for_each_number<kTileVectors>([&](auto half) TQ_INLINED {
        constexpr int kHalf = decltype(half)::value;
        load_words<PACKED>(segment + piece * kPiece + kHalf * kTokens * stride, stride,
                           words[kHalf]);
      });
    };
    constexpr int kLow = kLowSegments<BITS> / kStages<BITS>;  // of a stage
    Bytes low[kLow][kTileVectors][4], one_bit[kTileVectors][4];
    if constexpr (kSegments<BITS> > 1) load_segment(segments[kSegments<BITS> - 1], one_bit);
    const auto& high = kSegments<BITS> > 1 ? one_bit : low[0];
    const float* of_query[QUERIES];
    for_each_number<QUERIES>([&](auto query) TQ_INLINED {
      constexpr int kQuery = decltype(query)::value;
      of_query[kQuery] =
          keep_pointer(prepared + kQuery * pitch + piece * (kSlots<BITS> * 4 * kFactorFloats));
    });
    for_each_number<kStages<BITS>>([&](auto stage) TQ_INLINED {
      constexpr int kStage = decltype(stage)::value;
      constexpr int kSlotsOfIt = kSlots<BITS> / kStages<BITS>;
      for_each_number<kLow>([&](auto i) TQ_INLINED {
        constexpr int kAt = decltype(i)::value;
        load_segment(segments[kAt * kStages<BITS> + kStage], low[kAt]);
      });
      for_each_number<4>([&](auto w) TQ_INLINED {
        constexpr int kWord = decltype(w)::value;
        if constexpr (PACKED > 1 && kPiece == 16) {
          if (4 * piece + kWord >= needed) return;
        }
        for_each_number<kSlotsOfIt>([&](auto slot) TQ_INLINED {
          constexpr int kSlot = slot_at<BITS>(kStage * kSlotsOfIt + decltype(slot)::value);
          constexpr int kLast = kTileVectors - 1;
          const auto& own = low[kSlot % kLowSegments<BITS> / kStages<BITS>];
          const Codes one = codes_of<BITS, kSlot>(tables, own[0][kWord], high[0][kWord]);
          const Codes last = codes_of<BITS, kSlot>(tables, own[kLast][kWord], high[kLast][kWord]);
          for_each_number<QUERIES>([&](auto query) TQ_INLINED {
            constexpr int kQuery = decltype(query)::value;
            const Factors by = load_factors(of_query[kQuery] + (kSlot * 4 + kWord) * kFactorFloats);
            add_key_products(sums[kTileVectors * kQuery], one, by);
            if constexpr (kTileVectors == 2) add_key_products(sums[2 * kQuery + 1], last, by);
          });
        });
      });
    });
  }
}

// scores[q][0 .. tokens of a tile)
template <int BITS, int QUERIES, int PACKED>
TQ_INLINE void score_tile(const RowFormat& format, const Rows& rows, int t, int all,
                          const Tables& tables, const float* prepared, int pitch,
                          const Ending* endings, float unit, PacedPrefetch& pace, float* scores) {
  Sums sums[kTileVectors * QUERIES];
  sum_tile<BITS, QUERIES, PACKED>(format, rows, t, all, tables, prepared, pitch, pace, sums);
  for_each_number<QUERIES>([&](auto query) TQ_INLINED {
    constexpr int kQuery = decltype(query)::value;
    store_scores<PACKED>(sums + kTileVectors * kQuery, endings[kQuery].total,
                         endings[kQuery].step * unit, scores + kQuery * kBlock);
  });
}

template <int BITS, int QUERIES, int PACKED, class FOLDING = Folding>
void score_tiles(const RowFormat& format, const uint8_t* rows, int count, const Tables& tables,
                 const float* prepared, int pitch, float unit, tq::PrefetchRange prefetch,
                 float* scores) {
  constexpr int kTile = 4 * PACKED * kTileVectors;
  const Rows source(format, rows, count, kTile);
  Ending endings[QUERIES];
  for (int q = 0; q < QUERIES; ++q) endings[q] = ending_at(format, prepared + q * pitch);
  const int all = pieces(format);
  PacedPrefetch pace(prefetch, (count + kTile - 1) / kTile);
  int t = 0;
  if constexpr (FOLDING::kIsOn && PACKED == 1) {
    // The quarters of two tiles are added at once. Behind the last tile nothing is added; scores have
    // room for whole blocks.
    typename FOLDING::Folded folded[2][QUERIES] = {};
    for (int half = 0; t < count; t += kTile, half = 1 - half) {
      Sums sums[kTileVectors * QUERIES];
      sum_tile<BITS, QUERIES, PACKED>(format, source, t, all, tables, prepared, pitch, pace, sums);
      for_each_number<QUERIES>([&](auto query) TQ_INLINED {
        constexpr int kQuery = decltype(query)::value;
        folded[half][kQuery] = FOLDING::fold(sums[2 * kQuery], sums[2 * kQuery + 1]);
      });
      if (half == 0 && t + kTile < count) continue;
      for_each_number<QUERIES>([&](auto query) TQ_INLINED {
        constexpr int kQuery = decltype(query)::value;
        FOLDING::store(folded[0][kQuery], folded[1][kQuery], endings[kQuery].total,
                       endings[kQuery].step * unit, scores + kQuery * kBlock + t - half * kTile);
      });
    }
  } else {
    for (; t < count; t += kTile) {
      score_tile<BITS, QUERIES, PACKED>(format, source, t, all, tables, prepared, pitch, endings,
                                        unit, pace, scores + t);
    }
  }
}

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
// Slots of few bytes would leave most of a vector empty: quarters of it take four tokens each
// instead, and are added at the end. A line has up to four coordinates of a slot, in its words.
TQ_INLINE bool is_narrow(const RowFormat& format) {
  return Sides::kIsOn && (format.bits == 2 || segments_of(format) > 1) && format.slot_size <= 8 &&
         (format.slot_size & (format.slot_size - 1)) == 0;
}
TQ_INLINE int narrow_lines(const RowFormat& format) { return (format.slot_size + 3) / 4; }

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

int sums_floats(const RowFormat& format) {
  if (is_narrow(format)) return round_up(format.slots * narrow_lines(format) * 4, kWords);
  return format.slots * lines(format) * kWords;
}

// body(coordinate, index, count): neighbouring coordinates and where `interleave` leaves their
// sums.
template <class Body>
TQ_INLINE void for_each_quad(const RowFormat& format, Body&& body) {
  if (is_narrow(format)) {
    const int of_slot = narrow_lines(format);
    for (int slot = 0; slot < format.slots; ++slot) {
      for (int line = 0; line < of_slot; ++line) {
        body(slot * format.slot_size + 4 * line, 4 * (line * format.slots + slot),
             smaller(4, format.slot_size - 4 * line));
      }
    }
    return;
  }
  const int all = lines(format);
  const int quarters = kBytes / 16 / packed(format);  // of a row, side by side in a line
  for (int slot = 0; slot < format.slots; ++slot) {
    for (int piece = 0; piece < pieces(format); ++piece) {
      for (int word = 0; word < 4; ++word) {
        for (int quarter = 0; quarter < quarters; ++quarter) {
          const int byte = piece * piece_bytes(format) + 16 * quarter + 4 * word;
          if (byte >= format.slot_size) continue;
          const int line = slot * all + piece * piece_lines(format);
          body(slot * format.slot_size + byte, line * kWords + 4 * (word * quarters + quarter),
               smaller(4, format.slot_size - byte));
        }
      }
    }
  }
}

void natural_sums(const RowFormat& format, const float* sums, float* natural) {
  for_each_quad(format, [&](int coordinate, int index, int count) {
    for (int j = 0; j < count; ++j) natural[coordinate + j] = sums[index + j];
  });
}

void ordered_sums(const RowFormat& format, const float* natural, float* sums) {
  for (int i = 0; i < sums_floats(format); ++i) sums[i] = 0.0f;
  for_each_quad(format, [&](int coordinate, int index, int count) {
    for (int j = 0; j < count; ++j) sums[index + j] = natural[coordinate + j];
  });
}

// ---- over any number of query rows
// body(Number<queries>) for queries in [1, kMaxQueries].
template <int LARGEST = kMaxQueries, class Body>
TQ_INLINE void with_queries(int queries, Body&& body) {
  if constexpr (LARGEST > 1) {
    if (queries < LARGEST) return with_queries<LARGEST - 1>(queries, body);
  }
  body(Number<LARGEST>{});
}

// body(first, count) for even shares of at most kMaxQueries.
template <class Body>
TQ_INLINE void for_each_share(int queries, Body&& body) {
  const int shares = (queries + kMaxQueries - 1) / kMaxQueries;
  int first = 0;
  for (int share = 0; share < shares; ++share) {
    const int count = (queries - first + shares - share - 1) / (shares - share);
    body(first, count);
    first += count;
  }
}

void score_rows(const RowFormat& format, const uint8_t* rows, int count, const IntegerTable& table,
                const float* prepared, int pitch, int queries, float* scores,
                tq::PrefetchRange prefetch) {
  const Tables entries = make_tables(format, table.entries, make_key_table);
  with_format(format, [&](auto bits, auto many) {
    for_each_share(queries, [&](int first, int some) {
      with_queries(some, [&](auto share) {
        score_tiles<decltype(bits)::value, decltype(share)::value, decltype(many)::value>(
            format, rows, count, entries, prepared + first * pitch, pitch, table.unit,
            first == 0 ? prefetch : tq::PrefetchRange{}, scores + first * kBlock);
      });
    });
  });
}

// A step of a row of weights that are good; `largest` is the largest of them.
TQ_INLINE void store_step(const float* weights, float largest, int step, float* operands) {
  constexpr int kVectors = kStepRows / kWords;
  Floats x[kVectors];
  for (int i = 0; i < kVectors; ++i) x[i] = load_floats(weights + i * kWords);
  // Below this a step has no inverse; such weights are zeros beside anything.
  const float inverse = largest > 1e-30f ? tq::kLargestByteWeight / largest : 0.0f;
  const int32_t total = store_weights<kVectors>(
      x, inverse, reinterpret_cast<Group*>(operands + step * (kStepRows / 4) * kGroupFloats));
  operands[kGroups * kGroupFloats + step] = largest / tq::kLargestByteWeight;
  memcpy(operands + kGroups * kGroupFloats + kSteps + step, &total, sizeof total);
}

constexpr int kVectors = kBlock / kWords;
constexpr int kStepVectors = kStepRows / kWords;

// A row of kBlock weights; false, and nothing done, where one is negative or not finite.
TQ_INLINE bool store_row(const float* weights, float* operands) {
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

bool quantise_weights(const float* weights, int count, float* operands) {
  alignas(64) float x[kBlock];
  for (int i = 0; i < kVectors; ++i) {
    store_floats(x + i * kWords,
                 i * kWords < count ? load_floats(weights + i * kWords) : spread(0.0f));
  }
  if (store_row(x, operands)) return true;
  for (int i = 0; i < kVectors; ++i) store_floats(x + i * kWords, spread(0.0f));
  store_row(x, operands);
  return false;
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

bool any_reaches(const float* scores, int rows, const float* key_scales, const float* limits) {
  Reached reached = none_reached();
  for (int r = 0; r < rows; ++r) {
    const Floats limit = spread(limits[r]);
    for (int i = 0; i < kVectors; ++i) {
      reached = reaches(reached,
                        product(load_floats(scores + r * kBlock + i * kWords),
                                load_floats(key_scales + i * kWords)),
                        limit);
    }
  }
  return any_reached(reached);
}

void softmax_block(const float* scores, int rows, const float* key_scales,
                   const tq::PartScales& value_scales, float* maxima, float* exponentials,
                   float* operands, tq::PrefetchRange prefetch) {
  PacedPrefetch pace(prefetch, 3 * rows);
  const auto some_of = [&](int first, auto parts) {
    softmax_rows<decltype(parts)::value>(
        scores + first * kBlock, smaller(kSoftmaxRows, rows - first), key_scales, value_scales,
        maxima + first, exponentials + first, operands + first * tq::kOperandFloats, pace);
  };
  for (int first = 0; first < rows; first += kSoftmaxRows) {
    if (value_scales.parts == 1) {
      some_of(first, Number<1>{});
    } else {
      some_of(first, Number<tq::kMaxParts>{});
    }
  }
}

float softmax_block_zeros(const float* scores, const float* key_scales, const float* key_zeros,
                          float query_sum, const float* value_scales, const float* value_zeros,
                          float* maximum, float* operands, float* zeros) {
  Floats x[kVectors];
  alignas(64) float weights[kBlock];
  const Floats shift = spread(query_sum);
  for (int i = 0; i < kVectors; ++i) {
    const int at = i * kWords;
    x[i] = multiply_add(shift, load_floats(key_zeros + at),
                        product(load_floats(scores + at), load_floats(key_scales + at)));
  }
  const float top = largest_of_all<kVectors>(x);
  const float max = top > *maximum ? top : *maximum;
  // NaN scores are passed over by the maximum, and make the sum NaN below.
  if (!(max < __builtin_huge_valf()) || !(max > -__builtin_huge_valf())) {
    return __builtin_nanf("");
  }
  Floats sum = spread(0.0f), of_zeros = spread(0.0f);
  const Floats from = spread(max);
  for (int i = 0; i < kVectors; ++i) {
    const Floats weight = exponential(difference(x[i], from));
    sum = total_of_floats(sum, weight);
    of_zeros = multiply_add(weight, load_floats(value_zeros + i * kWords), of_zeros);
    store_floats(weights + i * kWords, product(weight, load_floats(value_scales + i * kWords)));
  }
  const float exponentials = sum_of_lanes(sum), all_zeros = sum_of_lanes(of_zeros);
  if (!(exponentials < __builtin_huge_valf()) || !(all_zeros - all_zeros == 0.0f) ||
      !store_row(weights, operands)) {
    return __builtin_nanf("");
  }
  *maximum = max;
  *zeros = all_zeros;
  return exponentials;
}

void accumulate_rows(const RowFormat& format, const uint8_t* rows, int count,
                     const IntegerTable& table, const float* operands, int queries, float* sums,
                     int pitch, tq::PrefetchRange prefetch) {
  const Tables entries = make_tables(format, table.entries, make_value_table);
  with_format(format, [&](auto bits, auto many) {
    for_each_share(queries, [&](int first, int some) {
      with_queries(some, [&](auto share) {
        constexpr int kBits = decltype(bits)::value;
        if constexpr (Sides::kIsOn && (kBits == 2 || kSegments<kBits> > 1)) {
          if (is_narrow(format)) {
            return accumulate_narrow<kBits, decltype(share)::value>(
                format, rows, count, entries, operands + first * tq::kOperandFloats, table.unit,
                first == 0 ? prefetch : tq::PrefetchRange{}, sums + first * pitch, pitch);
          }
        }
        accumulate_lines<decltype(bits)::value, decltype(share)::value, decltype(many)::value>(
            format, rows, count, entries, operands + first * tq::kOperandFloats, table.unit,
            first == 0 ? prefetch : tq::PrefetchRange{}, sums + first * pitch, pitch);
      });
    });
  });
}

constexpr tq::IntegerKernels make_integer_kernels() {
  tq::IntegerKernels all{};
  all.query_floats = query_floats;
  all.sums_floats = sums_floats;
  all.prepare_query = prepare_query;
  all.score_rows = score_rows;
  all.quantise_weights = quantise_weights;
  all.softmax_block = softmax_block;
  all.softmax_block_zeros = softmax_block_zeros;
  all.any_reaches = any_reaches;
  all.accumulate_rows = accumulate_rows;
  all.natural_sums = natural_sums;
  all.ordered_sums = ordered_sums;
  return all;
}

constexpr tq::IntegerKernels kIntegerKernels = make_integer_kernels();

}  // namespace
