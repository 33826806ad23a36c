// Rotates vectors into the space where they are coded, and back.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/kernels.h"

namespace tq {

// The rotation of one cache, float32 [D, C] with C = D, or 2 D for prod: [R | S^T]; or one matrix of
// each KV head [N, D, D], which need not be orthogonal. Every element of a product is one chain of
// fused multiply-adds, or one of additions in the fast form, so the result depends on neither the
// instruction set nor the other rows.
struct Rotation {
  int width = 0;                      // C
  const float* matrix = nullptr;      // [D, C], the first one; for rotate
  const float* transposed = nullptr;  // [C, D], likewise; for unrotate
  const float* signs = nullptr;       // [D]: R is diag(signs) H step, H the Sylvester matrix
  float step = 0.0f;
  std::ptrdiff_t pitch = 0;  // floats from the matrix of one head to the next; 0: one of all heads

  // The matrix of a head.
  Rotation of(int64_t head) const {
    Rotation own = *this;
    if (matrix != nullptr) own.matrix += head * pitch;
    if (transposed != nullptr) own.transposed += head * pitch;
    own.pitch = 0;
    return own;
  }
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

// The same of rows of these KV heads; neighbours of one head share its matrix.
void rotate_heads(const Kernels& kernels, const Rotation& rotation, const int64_t* heads,
                  const float* x, float* y, int rows, int head_size, int columns);
void unrotate_heads(const Kernels& kernels, const Rotation& rotation, const int64_t* heads,
                    const float* y, float* x, int rows, int head_size, int columns);

}  // namespace tq
