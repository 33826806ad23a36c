// From the bytes of rows to codes. A chunk is the bytes of kLanes neighbouring coordinates of every
// slot (core/kernels.h); the last chunk of a slot may be partial and reads its own bytes only.
// code(i + slot * slot_size) of 1, 2, 4 and 8 bits: byte[i] >> (bits * slot). Of 3 bits: the low
// two lie in a two-bit plane of twice the slot size, the third in the one-bit plane at high_plane.
// Of 5 bits: the low four in a four-bit plane of four times the slot size, the fifth likewise.

namespace {

template <int BITS>
constexpr int kSlots = BITS == 8 ? 1 : (BITS == 4 ? 2 : (BITS == 2 ? 4 : 8));

template <int BITS>
struct Chunk {
  I bytes;
};
template <>
struct Chunk<3> {
  I even, odd, high;  // two-bit plane of the even and of the odd slots, one-bit plane
};
template <>
struct Chunk<5> {
  I low[4], high;  // four-bit plane of slots 0, 4; 1, 5; 2, 6; 3, 7; one-bit plane
};

template <int BITS>
TQ_INLINE auto make_table_of(const float* table) {
  if constexpr (BITS == 5) {
    return make_wide_table(table);
  } else {
    return make_table(table);
  }
}

// body(Number<bits>)
template <class Body>
TQ_INLINE void with_bits(int bits, Body&& body) {
  switch (bits) {
    case 1:
      return body(Number<1>{});
    case 4:
      return body(Number<4>{});
    case 3:
      return body(Number<3>{});
    case 5:
      return body(Number<5>{});
    case 8:
      return body(Number<8>{});
    default:
      return body(Number<2>{});
  }
}

// PARTIAL is 1 for the last chunk of a slot where it has fewer than kLanes bytes.
template <int BITS, int PARTIAL>
TQ_INLINE Chunk<BITS> load_chunk(const RowFormat& format, const uint8_t* row, int at) {
  const int n = PARTIAL ? format.slot_size - at : kLanes;
  if constexpr (BITS == 3) {
    return {load_bytes(row + at, n), load_bytes(row + format.slot_size + at, n),
            load_bytes(row + format.high_plane + at, n)};
  } else if constexpr (BITS == 5) {
    const int size = format.slot_size;
    return {{load_bytes(row + at, n), load_bytes(row + size + at, n),
             load_bytes(row + 2 * size + at, n), load_bytes(row + 3 * size + at, n)},
            load_bytes(row + format.high_plane + at, n)};
  } else {
    return {load_bytes(row + at, n)};
  }
}

// Bits above the code are arbitrary; the table repeats.
template <int BITS, int SLOT>
TQ_INLINE I codes_of(const Chunk<BITS>& chunk) {
  if constexpr (BITS == 3) {
    const I low = shift_right<2 * (SLOT / 2)>(SLOT % 2 ? chunk.odd : chunk.even);
    return low_bits_of<2>(low, shift_right<SLOT>(shift_left<2>(chunk.high)));
  } else if constexpr (BITS == 5) {
    const I low = shift_right<4 * (SLOT / 4)>(chunk.low[SLOT % 4]);
    return low_bits_of<4>(low, shift_right<SLOT>(shift_left<4>(chunk.high)));
  } else {
    return shift_right<BITS * SLOT>(chunk.bytes);
  }
}

// body(Number<PARTIAL>, at) for every chunk.
template <class Body>
TQ_INLINE void for_each_chunk(const RowFormat& format, Body&& body) {
  int at = 0;
  for (; at + kLanes <= format.slot_size; at += kLanes) body(Number<0>{}, at);
  if (at < format.slot_size) body(Number<1>{}, at);
}

// body(Number<0>), ..., body(Number<LAST - 1>)
template <int LAST, int FIRST = 0, class Body>
TQ_INLINE void for_each_slot(Body&& body) {
  if constexpr (FIRST < LAST) {
    body(Number<FIRST>{});
    for_each_slot<LAST, FIRST + 1>(body);
  }
}

}  // namespace
