// The row format for the kernels, derived from the generated layout.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "core/attention_call.h"
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

constexpr bool has_planes(spec::Codec codec, const int* widths) {
  const spec::Planes planes = spec::planes(codec);
  int shift = 0;
  for (int i = 0; i < planes.count; ++i) {
    const spec::Plane plane = planes.plane[i];
    if (plane.width != widths[i] || plane.shift != shift) return false;
    shift += plane.width;
  }
  return planes.count == spec::kMaxPlanes || widths[planes.count] == 0;
}

constexpr bool are_unpacked(spec::Codec codec) {
  for (const auto& widths : kUnpackedPlanes) {
    if (has_planes(codec, widths)) return true;
  }
  return false;
}

constexpr bool all_are_unpacked() {
  for (const spec::Codec codec : spec::kCodecs) {
    if (!are_unpacked(codec)) return false;
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

// What the codes of rows stand for.
inline void fill_code_table(const CacheView& cache, float* table) {
  const int levels = spec::levels(cache.codec), negative = spec::sign_bit(cache.codec);
  if (negative == 0) return fill_table(cache.centroids, levels, table);
  for (int i = 0; i < kTable; ++i)
    table[i] = static_cast<float>((i ^ negative) % levels - negative);
}

// The one scale of each of up to kBlock rows; zeros behind them.
inline void load_scales(const Kernels& kernels, spec::Codec codec, const uint8_t* at, int stride,
                        int count, float* out) {
  if (!spec::has_float_scale(codec.kind)) return kernels.load_fields(at, stride, count, out);
  for (int t = 0; t < count; ++t) {
    std::memcpy(out + t, at + static_cast<std::ptrdiff_t>(t) * stride, sizeof *out);
  }
  std::fill(out + count, out + kBlock, 0.0f);
}

// Codebooks of more levels need not be made of integers.
constexpr int kIntegerLevels = 16;

// The most that the largest centroid of a codebook may be that is made of integers.
constexpr int kLargestInteger = 127;

// Of the largest centroid: what float32 leaves of a product.
constexpr float kSameNumber = 1e-6f;

// A table of centroids as integers, of which the largest is `largest_integer`; nothing where one is
// not finite, or the unit is no normal number.
inline std::optional<IntegerTable> rounded_integers(const float* table, int largest_integer) {
  float largest = 0.0f;
  for (int i = 0; i < kTable; ++i) largest = std::max(largest, std::fabs(table[i]));
  IntegerTable integers{};
  integers.unit = largest / static_cast<float>(largest_integer);
  if (!std::isnormal(integers.unit)) return std::nullopt;
  for (int i = 0; i < kTable; ++i) {
    const float number = std::nearbyint(table[i] / integers.unit);
    if (!(std::fabs(number) <= static_cast<float>(kLargestInteger))) return std::nullopt;
    integers.entries[i] = static_cast<int8_t>(number);
    integers.largest = std::max(integers.largest, std::abs(static_cast<int>(number)));
  }
  return integers;
}

// A table of centroids as integers up to `largest_integer`; nothing where one is no multiple of the
// unit that follows from that.
inline std::optional<IntegerTable> integers_of(const float* table, int largest_integer) {
  const std::optional<IntegerTable> integers = rounded_integers(table, largest_integer);
  if (!integers.has_value()) return std::nullopt;
  const float allowed = kSameNumber * integers->unit * static_cast<float>(largest_integer);
  for (int i = 0; i < kTable; ++i) {
    const float number = integers->entries[i];
    if (!(std::fabs(table[i] - number * integers->unit) <= allowed)) return std::nullopt;
  }
  return integers;
}

// A codebook as integers of a unit, the least ones that it is made of: small integers leave the most
// room in sums (core/lane_sums.h). Nothing where kLargestInteger is no multiple of a unit.
inline std::optional<IntegerTable> least_integers(const float* table, int levels) {
  const float top = *std::max_element(table, table + levels);
  const float most = std::max(top, -*std::min_element(table, table + levels));
  for (int largest = levels; largest <= kLargestInteger; ++largest) {
    // Most are ruled out by the first centroid, and this is done in each call.
    const float scale = static_cast<float>(largest) / most;
    const float allowed = 2.0f * kSameNumber * static_cast<float>(largest);
    bool may_be = true;
    for (int i = levels / 2; may_be && i < levels; ++i) {
      const float number = table[i] * scale;
      may_be = std::fabs(number - std::nearbyint(number)) <= allowed;
    }
    if (!may_be) continue;
    const std::optional<IntegerTable> integers = integers_of(table, largest);
    if (integers.has_value()) return integers;
  }
  return std::nullopt;
}

// The same for encoders and prompts, of up to kIntegerLevels; where kLargestInteger will do it is the
// largest, as it has always been.
inline std::optional<IntegerTable> encoder_integers(const float* table, int levels) {
  if (levels > kIntegerLevels) return std::nullopt;
  const std::optional<IntegerTable> integers = integers_of(table, kLargestInteger);
  return integers.has_value() ? integers : least_integers(table, levels);
}

// The closest neighbours of a codebook that is rounded to integers, in shares of its largest centroid:
// Lloyd-Max has them at a 25th or more. Of closer ones rounding would leave too little.
constexpr float kLeastGap = 1.0f / 28.0f;

// Of more levels, whose centroids are no multiples of a unit: the integers next to them, for the unit
// near the least one that has the least squared error. Of the Lloyd-Max codebook of 5 bits and 64
// coordinates or more it adds 1.4 % to the squared error of a code, where the least unit adds 1.9 %.
// Nothing where neighbours are closer than kLeastGap, or do not rise.
inline std::optional<IntegerTable> nearest_integers(const float* table, int levels) {
  std::optional<IntegerTable> nearest;
  float least = 0.0f;
  for (int largest = kLargestInteger; largest >= kLargestInteger - 15; --largest) {
    const std::optional<IntegerTable> integers = rounded_integers(table, largest);
    if (!integers.has_value()) return std::nullopt;
    const float gap = kLeastGap * static_cast<float>(largest) * integers->unit;
    float error = 0.0f;
    for (int i = 0; i < levels; ++i) {
      if (i > 0 && !(table[i] - table[i - 1] >= gap)) return std::nullopt;
      const float off = table[i] - static_cast<float>(integers->entries[i]) * integers->unit;
      error += off * off;
    }
    if (nearest.has_value() && error >= least) continue;
    nearest = integers;
    least = error;
  }
  return nearest;
}

}  // namespace tq
