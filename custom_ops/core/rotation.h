// Rotates vectors into the space where they are coded, and back.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/kernels.h"

namespace tq {

// The rotation of one cache, float32 [D, C] with C = D, or 2 D for prod: [R | S^T]. Every element of a
// product is one chain of fused multiply-adds, or one of additions in the fast form, so the result
// depends on neither the instruction set nor the other rows.
struct Rotation {
  int width = 0;                      // C
  const float* matrix = nullptr;      // [D, C], for rotate
  const float* transposed = nullptr;  // [C, D], for unrotate
  const float* signs = nullptr;       // [D]: R is diag(signs) H step, H the Sylvester matrix
  float step = 0.0f;
};

// Whether the first `head_size` columns of [head_size, width] are diag(signs) H step, entry by
// entry; then `signs` and `step` are filled.
bool read_hadamard(const float* matrix, int head_size, int width, float* signs, float* step);

// out[j][i] = matrix[i][j] for a matrix [rows, columns].
void transpose(const float* matrix, int rows, int columns, float* out);

// x [rows, head_size] to the first `columns` of its product with the matrix, y [rows, columns];
// apart.
void rotate(const Kernels& kernels, const Rotation& rotation, const float* x, float* y, int rows,
            int head_size, int columns);

// y [rows, columns] to its product with the first `columns` rows of the transposed matrix,
// x [rows, head_size]; apart. With D columns this is y R^T.
void unrotate(const Kernels& kernels, const Rotation& rotation, const float* y, float* x, int rows,
              int head_size, int columns);

}  // namespace tq
