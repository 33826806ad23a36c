// Where codes, fields and entries of caches [B, N, S, W] are if codes and fields lie apart.
//
// The bytes of each sequence hold the codes [N, S - R, code bytes], the fields [N, S - R, field bytes],
// then the R rows of the overlay [N, R, W], of which a short cache has fewer; so both of one sequence are contiguous tensors.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tq/codec_spec.h"

namespace tq {

struct Planes {
  Planes(spec::Codec codec, int head_size, int64_t all_heads, int64_t all_slots, int64_t overlay)
      : heads(all_heads),
        overlay_rows(std::min(overlay, all_slots)),
        slots(all_slots - overlay_rows),
        code_bytes(spec::code_bytes(codec, head_size)),
        field_bytes(spec::field_bytes(codec, head_size)) {}

  int64_t width() const { return code_bytes + field_bytes; }
  // The first byte of a sequence, or of all after `batch` of them.
  int64_t sequence(int64_t b) const { return b * heads * (slots + overlay_rows) * width(); }
  int64_t codes(int64_t b, int64_t n, int64_t slot) const {
    return sequence(b) + (n * slots + slot) * code_bytes;
  }
  int64_t fields(int64_t b, int64_t n, int64_t slot) const {
    return sequence(b) + heads * slots * code_bytes + (n * slots + slot) * field_bytes;
  }
  int64_t overlay(int64_t b, int64_t n) const {
    return sequence(b) + (heads * slots + n * overlay_rows) * width();
  }

  int64_t heads, overlay_rows, slots;
  int code_bytes, field_bytes;
};

}  // namespace tq
