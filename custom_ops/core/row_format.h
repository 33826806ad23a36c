// The row format for the kernels, derived from the generated layout.
#pragma once

#include <algorithm>
#include <cmath>
#include <optional>

#include "core/kernels.h"
#include "tq/codec_spec.h"

namespace tq {

// Codes of `bits` each, in the planes that lloyd_max has (one for 1 bit, a byte each for 8).
inline RowFormat row_format(int bits, int head_size, int lanes, int stride,
                            const uint8_t* end = nullptr) {
  const bool two_planes = bits == 3 || bits == 5;
  const int narrowest = two_planes ? 1 : bits;
  RowFormat format{};
  format.bits = bits;
  format.head_size = head_size;
  format.slots = 8 / narrowest;
  format.slot_size = spec::plane_bytes(narrowest, head_size);
  format.padded_slot = (format.slot_size + lanes - 1) / lanes * lanes;
  format.padded = format.slots * format.padded_slot;
  format.high_plane = two_planes ? spec::plane_bytes(bits - 1, head_size) : 0;
  format.stride = stride;
  format.end = end;
  return format;
}

// The kernels unpack these planes by hand; a codec with others must come here first.
constexpr int kUnpackedPlanes[][spec::kMaxPlanes] = {{},  {8},    {1},    {2},
                                                     {4}, {2, 1}, {4, 1}, {2, 1, 1}};

constexpr bool has_planes(spec::Codec codec, int of_class, const int* widths) {
  const spec::Planes planes = spec::planes(codec);
  int found = 0, shift = 0;
  for (int i = 0; i < planes.count; ++i) {
    const spec::Plane plane = planes.plane[i];
    if (plane.of_class != of_class) continue;
    if (plane.width != widths[found] || plane.shift != shift) return false;
    ++found;
    shift += plane.width;
  }
  return found == spec::kMaxPlanes || widths[found] == 0;
}

constexpr bool are_unpacked(spec::Codec codec, int of_class) {
  for (const auto& widths : kUnpackedPlanes) {
    if (has_planes(codec, of_class, widths)) return true;
  }
  return false;
}

constexpr bool all_are_unpacked() {
  for (const spec::Codec codec : spec::kCodecs) {
    for (int k = 0; k < spec::classes(codec.kind); ++k) {
      if (!are_unpacked(codec, k)) return false;
    }
  }
  return true;
}
static_assert(spec::kMaxLevels == kTable && all_are_unpacked());

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

inline void fill_table(const float* centroids, int levels, float* table) {
  for (int i = 0; i < kTable; ++i) table[i] = centroids[i % levels];
}

// Codes of more levels are no 8-bit integers.
constexpr int kIntegerLevels = 16;

// The largest centroid of a codebook that is made of integers.
constexpr int kLargestInteger = 127;

// Of the largest centroid: what float32 leaves of a product.
constexpr float kSameNumber = 1e-6f;

// A table of centroids, filled for `levels`, as integers up to `largest_integer`; nothing where one
// is no multiple of the unit that follows from that.
inline std::optional<IntegerTable> integers_of(const float* table, int levels,
                                               int largest_integer) {
  if (levels > kIntegerLevels) return std::nullopt;
  float largest = 0.0f;
  for (int i = 0; i < kIntegerLevels; ++i) largest = std::max(largest, std::fabs(table[i]));
  const float unit = largest / static_cast<float>(largest_integer);
  if (!std::isnormal(unit)) return std::nullopt;
  IntegerTable integers{};
  for (int i = 0; i < kIntegerLevels; ++i) {
    const float number = std::nearbyint(table[i] / unit);
    if (!(std::fabs(table[i] - number * unit) <= kSameNumber * largest)) return std::nullopt;
    integers.entries[i] = static_cast<int8_t>(number);
  }
  integers.unit = unit;
  return integers;
}

}  // namespace tq
