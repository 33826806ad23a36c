// Products with matrices, and the fast Walsh-Hadamard transform; the contract is in rotation.h.
#include "core/rotation.h"

#include <cmath>

#include "tq/codec_spec.h"

namespace tq {
namespace {

// One round of sums and differences; constant counts let the compiler use vectors.
template <int HALF>
void add_and_subtract(float* x, int size) {
  constexpr int kSome = HALF < 8 ? HALF : 8;
  for (int from = 0; from < size; from += 2 * HALF) {
    for (int at = from; at < from + HALF; at += kSome) {
      float low[kSome], high[kSome];
      for (int i = 0; i < kSome; ++i) low[i] = x[at + i];
      for (int i = 0; i < kSome; ++i) high[i] = x[at + HALF + i];
      for (int i = 0; i < kSome; ++i) x[at + i] = low[i] + high[i];
      for (int i = 0; i < kSome; ++i) x[at + HALF + i] = low[i] - high[i];
    }
  }
}

// The first two rounds, of four neighbours at a time.
void add_and_subtract_neighbours(float* x, int size) {
  for (int i = 0; i < size; i += 4) {
    const float a = x[i] + x[i + 1], b = x[i] - x[i + 1];
    const float c = x[i + 2] + x[i + 3], d = x[i + 2] - x[i + 3];
    x[i] = a + c;
    x[i + 1] = b + d;
    x[i + 2] = a - c;
    x[i + 3] = b - d;
  }
}

// x H, in log2(size) rounds of sums and differences.
void hadamard(float* x, int size) {
  static_assert(spec::kMaxHeadSize == 512, "one round per power of two");
  if (size < 4) return size < 2 ? void() : add_and_subtract<1>(x, size);
  add_and_subtract_neighbours(x, size);
  if (size >= 8) add_and_subtract<4>(x, size);
  if (size >= 16) add_and_subtract<8>(x, size);
  if (size >= 32) add_and_subtract<16>(x, size);
  if (size >= 64) add_and_subtract<32>(x, size);
  if (size >= 128) add_and_subtract<64>(x, size);
  if (size >= 256) add_and_subtract<128>(x, size);
  if (size >= 512) add_and_subtract<256>(x, size);
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
