// Many query rows: a block of up to kBlock rows is decoded once, to memory, for `multiply`.
//   decode_columns: keys[j][t], leading dimension kBlock, zero up to a multiple of kLanes
//   decode_rows:    values[t][j], leading dimension format.padded
// j runs in slot order (core/kernels.h); scales are left out (load_fields).

namespace {

template <int BITS>
void decode_columns_of(const RowFormat& format, const uint8_t* rows, int count, const float* table,
                       float* keys) {
  const auto centroids = make_table_of<BITS>(table);
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
            const uint8_t* const row = rows + (t + r) * format.stride;
            lanes[r] = lookup(centroids,
                              codes_of<BITS, kSlot>(load_chunk<BITS, kPartial>(format, row, at)));
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
  const auto centroids = make_table_of<BITS>(table);
  for (int t = 0; t < count; ++t, rows += format.stride, values += format.padded) {
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

void load_fields(const uint8_t* at, int stride, int count, float* out) {
  int t = 0;
  for (; t + kLanes <= count; t += kLanes) {
    store(out + t, gather_half(at + static_cast<ptrdiff_t>(t) * stride, stride));
  }
  uint16_t rest[kLanes] = {};
  for (int i = 0; t + i < count; ++i) {
    memcpy(rest + i, at + static_cast<ptrdiff_t>(t + i) * stride, sizeof *rest);
  }
  for (; t < kBlock; t += kLanes) {
    store(out + t, load_half(rest));
    for (uint16_t& one : rest) one = 0;
  }
}

void load_field_pairs(const uint8_t* at, int stride, int count, float* first, float* second) {
  uint32_t pairs[kBlock] = {};
  const auto pair = [&](int t) {
    uint32_t one;
    memcpy(&one, at + static_cast<ptrdiff_t>(t) * stride, sizeof one);
    return static_cast<uint64_t>(one);
  };
  int t = 0;
  for (; t + 2 <= count; t += 2) {
    const uint64_t two = pair(t) | pair(t + 1) << 32;
    memcpy(pairs + t, &two, sizeof two);
  }
  if (t < count) pairs[t] = static_cast<uint32_t>(pair(t));
  uint16_t low[kBlock], high[kBlock];
  for (int i = 0; i < kBlock; ++i) {
    low[i] = static_cast<uint16_t>(pairs[i]);
    high[i] = static_cast<uint16_t>(pairs[i] >> 16);
  }
  half_to_float(low, first, kBlock);
  half_to_float(high, second, kBlock);
}

void transpose_block(const float* rows, int count, int width, float* columns) {
  for (int t = 0; t < count; t += kLanes) {
    for (int at = 0; at < width; at += kLanes) {
      V lanes[kLanes];
      for (int r = 0; r < kLanes; ++r) {
        lanes[r] = t + r < count ? load(rows + static_cast<ptrdiff_t>(t + r) * width + at) : zero();
      }
      transpose_lanes(lanes);
      float* const out = columns + static_cast<ptrdiff_t>(at) * kBlock + t;
      for (int j = 0; j < kLanes; ++j) store(out + j * kBlock, lanes[j]);
    }
  }
}

}  // namespace
