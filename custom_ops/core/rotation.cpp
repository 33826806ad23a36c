// Products with matrices, and the fast Walsh-Hadamard transform; the contract is in rotation.h.
#include "core/rotation.h"

#include <cmath>

#include "tq/codec_spec.h"

namespace tq {
namespace {

// x H, in log2(size) rounds of sums and differences.
void hadamard(float* x, int size) {
  for (int half = 1; half < size; half *= 2) {
    for (int from = 0; from < size; from += 2 * half) {
      float* const low = x + from;
      float* const high = low + half;
      for (int i = 0; i < half; ++i) {
        const float sum = low[i] + high[i], difference = low[i] - high[i];
        low[i] = sum;
        high[i] = difference;
      }
    }
  }
}

bool is_odd(unsigned bits) {
  bool odd = false;
  for (; bits != 0; bits &= bits - 1) odd = !odd;
  return odd;
}

}  // namespace

bool read_hadamard(const float* matrix, int head_size, int width, float* signs, float* step) {
  if (head_size <= 0 || (head_size & (head_size - 1)) != 0) return false;
  *step = std::fabs(matrix[0]);
  if (!(*step > 0.0f) || std::isinf(*step)) return false;
  for (int i = 0; i < head_size; ++i) {
    const float* const row = matrix + static_cast<ptrdiff_t>(i) * width;
    signs[i] = row[0] < 0.0f ? -1.0f : 1.0f;
    for (int j = 0; j < head_size; ++j) {
      const float entry = is_odd(static_cast<unsigned>(i & j)) ? -*step : *step;
      if (row[j] != signs[i] * entry) return false;
    }
  }
  return true;
}

void transpose(const float* matrix, int rows, int columns, float* out) {
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < columns; ++j) {
      out[static_cast<ptrdiff_t>(j) * rows + i] = matrix[static_cast<ptrdiff_t>(i) * columns + j];
    }
  }
}

void rotate(const Kernels& kernels, const Rotation& rotation, const float* x, float* y, int rows,
            int head_size, int columns) {
  int done = 0;
  if (rotation.signs != nullptr) {
    done = head_size;
    for (int r = 0; r < rows; ++r) {
      const float* const from = x + static_cast<ptrdiff_t>(r) * head_size;
      float* const to = y + static_cast<ptrdiff_t>(r) * columns;
      for (int i = 0; i < head_size; ++i) to[i] = from[i] * rotation.signs[i];
      hadamard(to, head_size);
      for (int i = 0; i < head_size; ++i) to[i] *= rotation.step;
    }
  }
  if (done < columns) {
    kernels.rotate(x, head_size, rotation.matrix + done, rotation.width, y + done, columns, rows,
                   head_size, columns - done);
  }
}

void unrotate(const Kernels& kernels, const Rotation& rotation, const float* y, float* x, int rows,
              int head_size, int columns) {
  if (rotation.signs == nullptr) {
    kernels.rotate(y, columns, rotation.transposed, head_size, x, head_size, rows, columns,
                   head_size);
    return;
  }
  alignas(64) float turned[spec::kMaxHeadSize];
  const int rest = columns - head_size;
  for (int r = 0; r < rows; ++r, x += head_size, y += columns) {
    for (int i = 0; i < head_size; ++i) turned[i] = y[i];
    hadamard(turned, head_size);
    for (int i = 0; i < head_size; ++i) turned[i] = turned[i] * rotation.step * rotation.signs[i];
    if (rest > 0) {
      kernels.rotate(y + head_size, columns,
                     rotation.transposed + static_cast<ptrdiff_t>(head_size) * head_size, head_size,
                     x, head_size, 1, rest, head_size);
      for (int i = 0; i < head_size; ++i) x[i] += turned[i];
    } else {
      for (int i = 0; i < head_size; ++i) x[i] = turned[i];
    }
  }
}

}  // namespace tq
