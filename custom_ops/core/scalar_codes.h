// Reads single codes from the planes of a row. For the portable kernels: files that are compiled for
// an instruction set do not include this one.
#pragma once

#include <cstdint>

#include "core/kernels.h"

namespace tq {

inline int field_at(const uint8_t* plane, int width, int size, int at) {
  return (plane[at % size] >> (width * (at / size))) & ((1 << width) - 1);
}

// The code of coordinate j, below kTable.
inline int code_at(const RowFormat& format, const uint8_t* row, int j) {
  const int n = format.slot_size;
  switch (format.bits) {
    case 1:
    case 2:
    case 4:
      return field_at(row, format.bits, n, j);
    case 3:
      return field_at(row, 2, 2 * n, j) | field_at(row + format.high_plane, 1, n, j) << 2;
    case 5:
      return field_at(row, 4, 4 * n, j) | field_at(row + format.high_plane, 1, n, j) << 4;
    default:
      return row[j] % kTable;
  }
}

}  // namespace tq
