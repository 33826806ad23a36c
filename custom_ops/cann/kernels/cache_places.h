// Where rows and entries of a cache [batch, heads, capacity, W] are, in bytes from its beginning.
//
//   rows    of each head the overlay, and a row for each token
//   planes  of each sequence the codes of all heads' tokens, their scales, and the heads' overlays
//
// A lane is a head of a sequence, counted over all; slot 0 is that of its first token.
#pragma once

#include <cstdint>

#include "kernel_operator.h"

namespace tq {

struct CachePlaces {
  uint32_t heads, tokens, overlay_rows;  // tokens of a lane, and rows in front of or behind them
  uint32_t row_bytes, scale_bytes;
  bool has_planes;

  __aicore__ inline uint64_t lanes(uint64_t count) const {
    return count * (tokens + overlay_rows) * row_bytes;
  }

  // A row, or in planes its codes; and its scale in planes.
  __aicore__ inline uint64_t row(uint32_t lane, uint64_t slot) const {
    if (!has_planes) return lanes(lane) + (overlay_rows + slot) * row_bytes;
    return sequence(lane) + (first_of(lane) + slot) * code_bytes();
  }
  __aicore__ inline uint64_t scale(uint32_t lane, uint64_t slot) const {
    return sequence(lane) + all() * code_bytes() + (first_of(lane) + slot) * scale_bytes;
  }

  __aicore__ inline uint64_t entries(uint32_t lane) const {
    if (!has_planes) return lanes(lane);
    return sequence(lane) + (all() + lane % heads * uint64_t{overlay_rows}) * row_bytes;
  }

 private:
  __aicore__ inline uint32_t code_bytes() const { return row_bytes - scale_bytes; }
  __aicore__ inline uint64_t sequence(uint32_t lane) const { return lanes(lane / heads * heads); }
  // Tokens of a sequence: those before a lane's, and of all lanes.
  __aicore__ inline uint64_t first_of(uint32_t lane) const {
    return lane % heads * uint64_t{tokens};
  }
  __aicore__ inline uint64_t all() const { return heads * uint64_t{tokens}; }
};

}  // namespace tq
