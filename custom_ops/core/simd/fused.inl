// Few query rows: decoded keys and values stay in registers.
//   score_rows:      scores[q][t] = sum over j of query[q][j] * centroid(t, j)
//   accumulate_rows: sums[q][j]  += sum over t of weights[q][t] * centroid(t, j)
// without the rows' scales. Order of summation: a score adds chunk by chunk, within a chunk slot by
// slot, kLanes partial sums added by store_4_sums at the end; a sum adds over rising t. Neither
// depends on how query rows are grouped or rows are tiled.

namespace {

// Query rows that share decoded keys and values: fewer than the registers hold, as products of integers
// have taken their place for most books, and every number of rows is compiled for each number of bits.
constexpr int kFusedGroup = 2;
static_assert(kFusedGroup <= kScoreGroup);

// Of four rows.
template <int BITS, int QUERIES, class AnyTable>
TQ_INLINE void score_tile(const RowFormat& format, const uint8_t* const* rows,
                          const AnyTable& table, const float* query, float* scores) {
  V sums[QUERIES][4];
  for (int q = 0; q < QUERIES; ++q) {
    for (int r = 0; r < 4; ++r) sums[q][r] = zero();
  }
  for_each_chunk(format, [&](auto partial, int at) {
    constexpr int kPartial = decltype(partial)::value;
    Chunk<BITS> chunk[4];
    for (int r = 0; r < 4; ++r) chunk[r] = load_chunk<BITS, kPartial>(format, rows[r], at);
    for_each_slot<kSlots<BITS>>([&](auto slot) {
      constexpr int kSlot = decltype(slot)::value;
      const float* const q_at = query + kSlot * format.padded_slot + at;
      for (int r = 0; r < 4; ++r) {
        const V key = lookup(table, codes_of<BITS, kSlot>(chunk[r]));
        for (int q = 0; q < QUERIES; ++q) {
          sums[q][r] = fma(key, load(q_at + q * format.padded), sums[q][r]);
        }
      }
    });
  });
  for (int q = 0; q < QUERIES; ++q) {
    store_4_sums(scores + q * kBlock, sums[q][0], sums[q][1], sums[q][2], sums[q][3]);
  }
}

// Asks for the rows one block further on, which the next call wants; never faults.
TQ_INLINE void prefetch_rows(const uint8_t* row, int stride, int rows) {
  const uintptr_t from = reinterpret_cast<uintptr_t>(row) + static_cast<uintptr_t>(kBlock * stride);
  for (int at = 0; at < rows * stride; at += 64) {
    prefetch(reinterpret_cast<const void*>(from + static_cast<uintptr_t>(at)));
  }
}

template <int BITS, int QUERIES>
void score_group(const RowFormat& format, const uint8_t* rows, int count, const float* table,
                 const float* query, float* scores) {
  const auto centroids = make_table_of<BITS>(table);
  for (int t = 0; t < count; t += 4) {
    prefetch_rows(rows + t * format.stride, format.stride, 4);
    // Behind the last row comes itself again: scores have room for whole blocks.
    const uint8_t* four[4];
    for (int r = 0; r < 4; ++r) four[r] = rows + smaller(t + r, count - 1) * format.stride;
    score_tile<BITS, QUERIES>(format, four, centroids, query, scores + t);
  }
}

template <int BITS, int QUERIES>
void accumulate_group(const RowFormat& format, const uint8_t* rows, int count, const float* table,
                      const float* weights, float* sums) {
  constexpr int kFit = kSumRegisters / (QUERIES * kSlots<BITS>);
  constexpr int kChunks = kFit < 1 ? 1 : (kFit > 4 ? 4 : kFit);
  const auto centroids = make_table_of<BITS>(table);
  prefetch_rows(rows, format.stride, count);
  const auto pass = [&](auto chunks, auto partial, int at) {
    constexpr int kPass = decltype(chunks)::value;
    constexpr int kPartial = decltype(partial)::value;
    V total[kPass][kSlots<BITS>][QUERIES];
    for (int c = 0; c < kPass; ++c) {
      for (int s = 0; s < kSlots<BITS>; ++s) {
        for (int q = 0; q < QUERIES; ++q) {
          total[c][s][q] =
              load(sums + q * format.padded + s * format.padded_slot + at + c * kLanes);
        }
      }
    }
    const uint8_t* row = rows;
    for (int t = 0; t < count; ++t, row += format.stride) {
      for (int c = 0; c < kPass; ++c) {
        const Chunk<BITS> chunk = load_chunk<BITS, kPartial>(format, row, at + c * kLanes);
        for_each_slot<kSlots<BITS>>([&](auto slot) {
          constexpr int kSlot = decltype(slot)::value;
          const V value = lookup(centroids, codes_of<BITS, kSlot>(chunk));
          for (int q = 0; q < QUERIES; ++q) {
            total[c][kSlot][q] = fma(value, set1(weights[q * kBlock + t]), total[c][kSlot][q]);
          }
        });
      }
    }
    for (int c = 0; c < kPass; ++c) {
      for (int s = 0; s < kSlots<BITS>; ++s) {
        for (int q = 0; q < QUERIES; ++q) {
          store(sums + q * format.padded + s * format.padded_slot + at + c * kLanes,
                total[c][s][q]);
        }
      }
    }
  };
  int at = 0;
  if constexpr (kChunks > 1) {
    for (; at + kChunks * kLanes <= format.slot_size; at += kChunks * kLanes) {
      pass(Number<kChunks>{}, Number<0>{}, at);
    }
  }
  for (; at + kLanes <= format.slot_size; at += kLanes) pass(Number<1>{}, Number<0>{}, at);
  if (at < format.slot_size) pass(Number<1>{}, Number<1>{}, at);
}

void score_rows(const RowFormat& format, const uint8_t* rows, int count, const float* table,
                const float* query, int queries, float* scores) {
  while (queries > 0) {
    const int group = smaller(queries, kFusedGroup);
    with_bits(format.bits, [&](auto bits) {
      with_group<kFusedGroup>(group, [&](auto some) {
        score_group<decltype(bits)::value, decltype(some)::value>(format, rows, count, table, query,
                                                                  scores);
      });
    });
    queries -= group;
    query += static_cast<ptrdiff_t>(group) * format.padded;
    scores += group * kBlock;
  }
}

void accumulate_rows(const RowFormat& format, const uint8_t* rows, int count, const float* table,
                     const float* weights, int queries, float* sums) {
  while (queries > 0) {
    const int group = smaller(queries, kFusedGroup);
    with_bits(format.bits, [&](auto bits) {
      with_group<kFusedGroup>(group, [&](auto some) {
        accumulate_group<decltype(bits)::value, decltype(some)::value>(format, rows, count, table,
                                                                       weights, sums);
      });
    });
    queries -= group;
    weights += group * kBlock;
    sums += static_cast<ptrdiff_t>(group) * format.padded;
  }
}

}  // namespace
