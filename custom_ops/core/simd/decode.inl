// Many query rows: a block of up to kBlock rows is decoded once, to memory, for `multiply`.
//   decode_columns: keys[j][t], leading dimension kBlock, zero up to a multiple of kLanes
//   decode_rows:    values[t][j], leading dimension format.padded
// j runs in slot order (core/kernels.h); scales are left out and read by row_scales.

namespace {

template <int BITS>
void decode_columns_of(const RowFormat& format, const uint8_t* rows, int count, const float* table,
                       float* keys) {
  const Table centroids = make_table(table);
  for (int t = 0; t < count; t += kLanes) {
    const int some = smaller(kLanes, count - t);
    for_each_chunk(format, [&](auto partial, int at) {
      constexpr int kPartial = decltype(partial)::value;
      for_each_slot<kSlots<BITS>>([&](auto slot) {
        constexpr int kSlot = decltype(slot)::value;
        V lanes[kLanes];
        for (int r = 0; r < kLanes; ++r) {
          lanes[r] = zero();
          if (r < some) {
            const uint8_t* const row = rows + (t + r) * format.row_bytes;
            lanes[r] = lookup(
                centroids, codes_of<BITS, kSlot>(load_chunk<BITS, kPartial>(format, row, at)));
          }
        }
        transpose_lanes(lanes);
        float* const out =
            keys + static_cast<ptrdiff_t>(kSlot * format.padded_slot + at) * kBlock + t;
        for (int j = 0; j < kLanes; ++j) store(out + j * kBlock, lanes[j]);
      });
    });
  }
}

template <int BITS>
void decode_rows_of(const RowFormat& format, const uint8_t* rows, int count, const float* table,
                    float* values) {
  const Table centroids = make_table(table);
  for (int t = 0; t < count; ++t, rows += format.row_bytes, values += format.padded) {
    for_each_chunk(format, [&](auto partial, int at) {
      constexpr int kPartial = decltype(partial)::value;
      const Chunk<BITS> chunk = load_chunk<BITS, kPartial>(format, rows, at);
      for_each_slot<kSlots<BITS>>([&](auto slot) {
        constexpr int kSlot = decltype(slot)::value;
        store(values + kSlot * format.padded_slot + at,
              lookup(centroids, codes_of<BITS, kSlot>(chunk)));
      });
    });
  }
}

void decode_columns(const RowFormat& format, const uint8_t* rows, int count, const float* table,
                    float* keys) {
  with_bits(format.bits, [&](auto bits) {
    decode_columns_of<decltype(bits)::value>(format, rows, count, table, keys);
  });
}

void decode_rows(const RowFormat& format, const uint8_t* rows, int count, const float* table,
                 float* values) {
  with_bits(format.bits, [&](auto bits) {
    decode_rows_of<decltype(bits)::value>(format, rows, count, table, values);
  });
}

void row_scales(const RowFormat& format, const uint8_t* rows, int count, float* scales) {
  uint16_t bits[kBlock] = {};
  const uint8_t* at = rows + format.scale_offset;
  for (int t = 0; t < count; ++t, at += format.row_bytes) {
    bits[t] = static_cast<uint16_t>(at[0] | at[1] << 8);
  }
  half_to_float(bits, scales, kBlock);
}

}  // namespace
