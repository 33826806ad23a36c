// Products with integers, in terms of the words of one vec_int_*.h and of one operands_*.h: how queries
// and weights are held.
//
// Codes are looked up as 8-bit integers; queries and weights are rounded to steps, of 8 bits
// (of the largest of a query, or of kStepRows weights), and every product and sum is exact. Weights and
// sums of values are in integer_values.inl; of levels that have TQ_LANES in integer_lanes.inl.
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

#ifdef TQ_LANES
constexpr bool kHasLanes = true;
#else
constexpr bool kHasLanes = false;
#endif
constexpr int kVectors = kBlock / kWords;
constexpr int kFactorFloats = sizeof(Factors) / sizeof(float);
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
constexpr bool kWide = kBytes >= 64;
constexpr int kMostPacked = kBytes / 16;
TQ_INLINE int packed(const RowFormat& format) {
  if (format.bits == 8) return 1;
  if (format.bits % 2 == 1 || format.slot_size <= 16) return kMostPacked;
  return kWide && (format.bits == 2 || format.slot_size <= 32) ? 2 : 1;
}
// Of 1, 2 or 4: calls are too short for divisions.
TQ_INLINE int over_packed(int n, const RowFormat& format) { return n >> packed(format) / 2; }
TQ_INLINE int piece_bytes(const RowFormat& format) { return over_packed(kBytes, format); }
TQ_INLINE int pieces(const RowFormat& format) {
  return (format.slot_size * packed(format) + kBytes - 1) / kBytes;
}
// The same of values: no vector is interleaved from the empty half of a piece.
TQ_INLINE bool is_half_piece(const RowFormat& format) {
  return kHasLanes && format.bits % 2 == 1 && format.slot_size <= 8;
}
// Vectors of words that the interleaved rows of a piece fill.
TQ_INLINE int piece_lines(const RowFormat& format) {
  return is_half_piece(format) ? 1 : over_packed(4, format);
}
TQ_INLINE int lines(const RowFormat& format) { return pieces(format) * piece_lines(format); }

// Bits of a code, and rows in a vector.
template <int BITS, int PACKED>
struct Form {
  static constexpr int kBits = BITS, kPacked = PACKED;
};

// body(the form of these rows), one of FORMS
template <class... FORMS, class Body>
TQ_INLINE void with_form_of(const RowFormat& format, Body&& body) {
  const int rows = packed(format);
  const auto is_taken = [&](auto form) TQ_INLINED {
    if (format.bits != decltype(form)::kBits || rows != decltype(form)::kPacked) return false;
    body(form);
    return true;
  };
  (void)(is_taken(FORMS{}) || ...);
}

// All forms that there are kernels for; with shorter registers, some of them are one.
template <class Body>
TQ_INLINE void with_form(const RowFormat& format, Body&& body) {
  with_form_of<Form<4, 1>, Form<4, kWide ? 2 : 1>, Form<4, kMostPacked>, Form<3, kMostPacked>,
               Form<5, kMostPacked>, Form<2, kWide ? 2 : 1>, Form<2, kMostPacked>,
               Form<1, kMostPacked>, Form<8, 1>>(format, body);
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
    // Of 32 bits: divisions of more take longer than some calls.
    const uint32_t all = static_cast<uint32_t>(prefetch.bytes),
                   times = static_cast<uint32_t>(steps);
    const uint32_t each = (all + times - 1) / times;
    const uint32_t lines = (each + kCacheLine - 1) / kCacheLine;
    count = static_cast<int>(lines);
    spacing = (each + lines - 1) / lines;
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
// Of the makers of a level. The second one is that of odd slots: of up to 2 bits it passes over the code
// of the even one, of 3 bits it looks at bits 0, 1 and 3. Or that of the upper half of the codes of 5 bits.
template <class Make>
TQ_INLINE Tables make_tables(const RowFormat& format, const int8_t* entries, Make&& make) {
  int8_t second[16];
  for (int i = 0; i < 16; ++i) {
    const int of_odd = format.bits == 3 ? (i & 3) | (i >> 3) << 2 : i >> format.bits;
    second[i] = entries[format.bits <= 3 ? of_odd : 16 + i];
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
  } else if constexpr (BITS <= 2) {
    constexpr int kPair = SLOT / 2;  // a nibble has the codes of both slots
    return as_codes(found(SLOT % 2 == 1 ? tables.second : tables.first,
                          nibbles(shift_right<2 * BITS * kPair>(low))));
  } else {
    return as_codes(found(tables.first, nibbles(shift_right<BITS == 8 ? 0 : BITS * SLOT>(low))));
  }
}

// ---- sums
// Slots of few bytes would leave most of a vector empty: quarters of it take four tokens each
// instead, and are added at the end. A line has up to four coordinates of a slot, in its words.
TQ_INLINE bool is_narrow(const RowFormat& format) {
  return Sides::kIsOn && (format.bits == 2 || segments_of(format) > 1) && format.slot_size <= 8 &&
         (format.slot_size & (format.slot_size - 1)) == 0;
}
TQ_INLINE int narrow_lines(const RowFormat& format) { return (format.slot_size + 3) / 4; }

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

}  // namespace

#ifdef TQ_LANES
#include "core/simd/integer_lanes.inl"
#else
#include "core/simd/integer_values.inl"
#endif

namespace {

// ---- queries
// A prepared query row: factors[piece][slot][w], as the words of the keys lie, then the value of a
// step and the sum of the steps.
struct Ending {
  float step;
  int32_t total;
};

TQ_INLINE int factor_count(const RowFormat& format) { return pieces(format) * format.slots * 4; }
int query_floats(const RowFormat& format) { return factor_count(format) * kFactorFloats + kWords; }
// With the sum times what entries of keys count from: what that adds to every score.
TQ_INLINE Ending ending_at(const RowFormat& format, const float* prepared, int begin) {
  Ending ending;
  memcpy(&ending, prepared + factor_count(format) * kFactorFloats, sizeof ending);
  ending.total *= begin;
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

// What is not finite becomes zeros with a step that is not a number. `least` is what the step is made
// for at least.
TQ_INLINE Ending quantise_operands(const float* x, int n, float least, Group* groups) {
  float largest = largest_of(x, n);
  if (least > largest) largest = least;
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

void prepare_query(const RowFormat& format, const IntegerTable& table, const float* natural,
                   float* prepared) {
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
  const Ending ending =
      quantise_operands(slotted, padded, reach_of_query(format, table, slotted, 4 * words), groups);
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
// Sums of words of kTileVectors vectors: those of query q from kTileVectors * q on. Products of ADDED
// slots are added at once.
template <int BITS, int QUERIES, int PACKED, int ADDED>
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
      constexpr int kAdded = ADDED < kSlotsOfIt ? ADDED : kSlotsOfIt;
      for_each_number<kLow>([&](auto i) TQ_INLINED {
        constexpr int kAt = decltype(i)::value;
        load_segment(segments[kAt * kStages<BITS> + kStage], low[kAt]);
      });
      const auto add_word = [&](int word) TQ_INLINED {
        for_each_number<kSlotsOfIt / kAdded>([&](auto some) TQ_INLINED {
          constexpr int kPlace = kStage * kSlotsOfIt + kAdded * decltype(some)::value;
          Codes codes[kAdded][kTileVectors];
          for_each_number<kAdded * kTileVectors>([&](auto i) TQ_INLINED {
            constexpr int kAt = decltype(i)::value / kTileVectors;
            constexpr int kHalf = decltype(i)::value % kTileVectors;
            constexpr int kSlot = slot_at<BITS>(kPlace + kAt);
            codes[kAt][kHalf] = codes_of<BITS, kSlot>(
                tables, low[kSlot % kLowSegments<BITS> / kStages<BITS>][kHalf][word],
                high[kHalf][word]);
          });
          constexpr int kFirst = slot_at<BITS>(kPlace) * 4;
          constexpr int kLast = slot_at<BITS>(kPlace + kAdded - 1) * 4;
          for_each_number<QUERIES>([&](auto query) TQ_INLINED {
            constexpr int kQuery = decltype(query)::value;
            add_products_of_keys(sums + kTileVectors * kQuery, codes,
                                 of_query[kQuery] + (kFirst + word) * kFactorFloats,
                                 of_query[kQuery] + (kLast + word) * kFactorFloats);
          });
        });
      };
      if constexpr (kWide && (BITS == 3 ? QUERIES > 4 : BITS == 5 && QUERIES > 2 && QUERIES < 6)) {
        // A loop: this code four times is large, and here, with more registers, takes a tenth longer.
        const int words = smaller(4, needed - 4 * piece);
        TQ_ROLLED for (int word = 0; word < words; ++word) add_word(word);
      } else {
        for_each_number<4>([&](auto word) TQ_INLINED {
          if constexpr (PACKED > 1 && kPiece == 16) {
            if (4 * piece + decltype(word)::value >= needed) return;
          }
          add_word(decltype(word)::value);
        });
      }
    });
  }
}

// scores[q][0 .. tokens of a tile)
template <int BITS, int QUERIES, int PACKED, int ADDED>
TQ_INLINE void score_tile(const RowFormat& format, const Rows& rows, int t, int all,
                          const Tables& tables, const float* prepared, int pitch,
                          const Ending* endings, float unit, PacedPrefetch& pace, float* scores) {
  Sums sums[kTileVectors * QUERIES];
  sum_tile<BITS, QUERIES, PACKED, ADDED>(format, rows, t, all, tables, prepared, pitch, pace, sums);
  for_each_number<QUERIES>([&](auto query) TQ_INLINED {
    constexpr int kQuery = decltype(query)::value;
    store_scores<PACKED>(sums + kTileVectors * kQuery, endings[kQuery].total,
                         endings[kQuery].step * unit, scores + kQuery * kBlock);
  });
}

template <int BITS, int QUERIES, int PACKED, int ADDED, class FOLDING = Folding>
void score_tiles(const RowFormat& format, const uint8_t* rows, int count, const Tables& tables,
                 int begin, const float* prepared, int pitch, float unit,
                 tq::PrefetchRange prefetch, float* scores) {
  constexpr int kTile = 4 * PACKED * kTileVectors;
  const Rows source(format, rows, count, kTile);
  Ending endings[QUERIES];
  for (int q = 0; q < QUERIES; ++q) endings[q] = ending_at(format, prepared + q * pitch, begin);
  const int all = pieces(format);
  PacedPrefetch pace(prefetch, (count + kTile - 1) / kTile);
  int t = 0;
  if constexpr (FOLDING::kIsOn && PACKED == 1) {
    // The quarters of two tiles are added at once. Behind the last tile nothing is added; scores have
    // room for whole blocks.
    typename FOLDING::Folded folded[2][QUERIES] = {};
    for (int half = 0; t < count; t += kTile, half = 1 - half) {
      Sums sums[kTileVectors * QUERIES];
      sum_tile<BITS, QUERIES, PACKED, ADDED>(format, source, t, all, tables, prepared, pitch, pace,
                                             sums);
      for_each_number<QUERIES>([&](auto query) TQ_INLINED {
        constexpr int kQuery = decltype(query)::value;
        folded[half][kQuery] = FOLDING::fold(sums + kTileVectors * kQuery);
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
      score_tile<BITS, QUERIES, PACKED, ADDED>(format, source, t, all, tables, prepared, pitch,
                                               endings, unit, pace, scores + t);
    }
  }
}

void score_rows(const RowFormat& format, const uint8_t* rows, int count, const IntegerTable& table,
                const float* prepared, int pitch, int queries, float* scores,
                tq::PrefetchRange prefetch) {
  const int begin = key_begin(table.largest);
  const Tables entries = make_tables(format, table.entries,
                                     [&](const int8_t* of) { return make_key_table(of, begin); });
  with_form(format, [&](auto form) {
    with_added(table, [&](auto added) TQ_INLINED {
      for_each_share(queries, [&](int first, int some) {
        with_queries(some, [&](auto share) {
          score_tiles<decltype(form)::kBits, decltype(share)::value, decltype(form)::kPacked,
                      decltype(added)::value>(
              format, rows, count, entries, begin, prepared + first * pitch, pitch, table.unit,
              first == 0 ? prefetch : tq::PrefetchRange{}, scores + first * kBlock);
        });
      });
    });
  });
}

bool quantise_weights(const float* weights, int count, int largest, float* operands) {
  alignas(64) float x[kBlock];
  for (int i = 0; i < kVectors; ++i) {
    store_floats(x + i * kWords,
                 i * kWords < count ? load_floats(weights + i * kWords) : spread(0.0f));
  }
  if (store_row(x, largest, operands)) return true;
  for (int i = 0; i < kVectors; ++i) store_floats(x + i * kWords, spread(0.0f));
  store_row(x, largest, operands);
  return false;
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
                          float query_sum, const tq::PartScales& value_scales,
                          const float* value_zeros, float* maximum, float* operands, float* zeros) {
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
    store_floats(weights + i * kWords,
                 product(weight, load_floats(value_scales.scales + i * kWords)));
  }
  const float exponentials = sum_of_lanes(sum), all_zeros = sum_of_lanes(of_zeros);
  if (!(exponentials < __builtin_huge_valf()) || !(all_zeros - all_zeros == 0.0f) ||
      !store_row(weights, *value_scales.largest, operands)) {
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
  with_form(format, [&](auto form) {
    const auto add = [&](auto packed) {
      add_values<decltype(form)::kBits, decltype(packed)::value>(
          format, rows, count, table, entries, operands, queries, sums, pitch, prefetch);
    };
    if constexpr (kHasLanes && decltype(form)::kBits % 2 == 1) {
      if (is_half_piece(format)) return add(Number<4>{});
    }
    add(Number<decltype(form)::kPacked>{});
  });
}

constexpr tq::IntegerKernels make_integer_kernels() {
  tq::IntegerKernels all{};
  all.has_lanes = kHasLanes;
  all.key_share = kHasLanes ? 1.0f : 0.6f;
  all.softmax_share = kHasLanes ? 0.0f : 0.4f;
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
