// The exact window. Its entries are in the overlay, the rows in front of the tokens' rows, or without
// an overlay in the spare rows behind them: at the end of the plane, as many as there is room for.
//
// An entry is a vector of D float16, then a tag: the token's number + 1 as uint32, 0 if it is empty.
// It fills whole rows. tq_onnx/codec/window.py documents the layout and the rule.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/element.h"
#include "core/half.h"
#include "core/kernels.h"
#include "tq/codec_spec.h"

namespace tq {

struct Window {
  int64_t recent, sinks;  // the newest and the first tokens that have entries; 0 and 0: none has
  int64_t overlay_rows;  // at least what the entries need, or 0: they take spare rows
  // Codes and fields lie apart (core/planes.h): only without pages, spare rows and padded rows.
  bool has_planes = false;

  bool is_on() const { return recent > 0 || sinks > 0; }
  int64_t entries() const { return recent + sinks; }

  // The entry of a token, -1 for a token that never has one.
  int64_t entry(int64_t token) const {
    if (token < sinks) return token;
    return recent == 0 ? -1 : sinks + (token - sinks) % recent;
  }

  bool takes_spare_rows() const { return is_on() && overlay_rows == 0; }
  // Entries lie by places, one after the other: in spare rows the newest tokens come first, since
  // tokens take rows of the first places.
  int64_t place(int64_t entry) const {
    return takes_spare_rows() ? (entry < sinks ? recent + entry : entry - sinks) : entry;
  }
  int64_t entry_at(int64_t place) const {
    return takes_spare_rows() ? (place < recent ? sinks + place : place - recent) : place;
  }
};

// The entries of a plane of `slots` rows of `width` bytes.
struct EntryPlaces {
  EntryPlaces(const Window& exact, int head_size, int width, int64_t slots)
      : window(exact), rows(spec::rows_per_entry(head_size, width)), bytes(rows * width) {
    begin = window.takes_spare_rows() ? slots - window.entries() * rows : 0;
  }

  // The first place behind the rows of so many tokens.
  int64_t first_place(int64_t tokens) const {
    if (!window.takes_spare_rows() || begin >= tokens) return 0;
    return std::min(window.entries(), (tokens - begin + rows - 1) / rows);
  }
  // Bytes from the first of the plane to a place, which is negative where a plane is too short.
  int64_t offset(int64_t place) const { return (begin + place * rows) * (bytes / rows); }

  const Window window;
  const int64_t rows, bytes;  // of an entry
  int64_t begin;  // the row of place 0
};

inline uint32_t entry_tag(const uint8_t* entry, int head_size) {
  const uint8_t* const tag = entry + spec::kEntryElementBytes * head_size;
  return tag[0] | static_cast<uint32_t>(tag[1]) << 8 | static_cast<uint32_t>(tag[2]) << 16 |
         static_cast<uint32_t>(tag[3]) << 24;
}

inline void set_entry_tag(uint8_t* entry, int head_size, uint32_t tag) {
  uint8_t* const out = entry + spec::kEntryElementBytes * head_size;
  for (int i = 0; i < spec::kEntryTagBytes; ++i) out[i] = static_cast<uint8_t>(tag >> 8 * i);
}

// Vector `index` of `vectors` as entries hold it: clamped, zeros if it is not finite, no -0 but of
// what is too small.
inline void round_vector(const Kernels& kernels, Element element, const void* vectors,
                         int64_t index, int head_size, uint16_t* halves) {
  alignas(64) float x[spec::kMaxHeadSize];
  const std::size_t size = static_cast<std::size_t>(head_size);
  load_floats(kernels, element, vectors, static_cast<std::size_t>(index) * size, x, size);
  const int32_t largest = largest_magnitude(x, head_size);
  if (largest > static_cast<int32_t>(float_to_bits(spec::kMaxHalf))) {
    if (!is_finite(x, head_size)) std::fill_n(x, size, 0.0f);
    for (std::size_t j = 0; j < size; ++j) x[j] = std::clamp(x[j], -spec::kMaxHalf, spec::kMaxHalf);
  }
  for (std::size_t j = 0; j < size; ++j) x[j] += 0.0f;
  kernels.float_to_half(x, halves, size);
}

}  // namespace tq
