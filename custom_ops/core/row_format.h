// From the generated layout to what the kernels need to know of it.
#pragma once

#include "core/kernels.h"
#include "tq/codec_spec.h"

namespace tq {

inline RowFormat row_format(int bits, int head_size, int lanes) {
  const spec::Planes planes = spec::planes(bits);
  const int narrowest = planes.plane[planes.count - 1].width;
  RowFormat format{};
  format.bits = bits;
  format.head_size = head_size;
  format.slots = 8 / narrowest;
  format.slot_size = spec::plane_bytes(narrowest, head_size);
  format.padded_slot = (format.slot_size + lanes - 1) / lanes * lanes;
  format.padded = format.slots * format.padded_slot;
  format.high_plane = spec::plane_offset(bits, 1, head_size);
  format.scale_offset = spec::scale_offset(bits, head_size);
  format.row_bytes = spec::row_bytes(bits, head_size);
  return format;
}

// A row of the codec raw is one slot, in the natural order; the kernels' decoders do not read it.
inline RowFormat raw_row_format(int element_bytes, int head_size, int lanes) {
  RowFormat format{};
  format.bits = 8 * element_bytes;
  format.head_size = head_size;
  format.slots = 1;
  format.slot_size = head_size;
  format.padded_slot = (head_size + lanes - 1) / lanes * lanes;
  format.padded = format.padded_slot;
  format.row_bytes = spec::raw_row_bytes(format.bits, head_size);
  format.scale_offset = format.row_bytes;
  return format;
}

// The kernels unpack these planes by hand; a new codec must come here first.
static_assert(spec::kMinBits == 2 && spec::kMaxBits == 4 && spec::kMaxLevels == kTable);
static_assert(spec::planes(2).count == 1 && spec::planes(2).plane[0].width == 2);
static_assert(spec::planes(3).count == 2 && spec::planes(3).plane[0].width == 2 &&
              spec::planes(3).plane[1].width == 1 && spec::planes(3).plane[1].shift == 2);
static_assert(spec::planes(4).count == 1 && spec::planes(4).plane[0].width == 4);
static_assert(spec::kScaleBytes == 2);

inline void to_slot_order(const RowFormat& format, const float* natural, float* slotted) {
  for (int slot = 0; slot < format.slots; ++slot) {
    for (int i = 0; i < format.padded_slot; ++i) {
      slotted[slot * format.padded_slot + i] =
          i < format.slot_size ? natural[slot * format.slot_size + i] : 0.0f;
    }
  }
}

inline void to_natural_order(const RowFormat& format, const float* slotted, float* natural) {
  for (int slot = 0; slot < format.slots; ++slot) {
    for (int i = 0; i < format.slot_size; ++i) {
      natural[slot * format.slot_size + i] = slotted[slot * format.padded_slot + i];
    }
  }
}

inline void fill_table(const float* centroids, int bits, float* table) {
  for (int i = 0; i < kTable; ++i) {
    table[i] = centroids[i & ((1 << bits) - 1)];
  }
}

}  // namespace tq
