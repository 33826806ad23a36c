// What the tests need of a codec: random data, a rotation, a codebook, and threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "core/dispatch.h"
#include "core/half.h"
#include "core/kernels.h"
#include "core/parallel.h"
#include "core/row_format.h"
#include "tests/guard.h"

namespace tq::test {

using Random = std::mt19937;

inline void fill_normal(float* out, std::size_t count, Random& random, float deviation = 1.0f) {
  std::normal_distribution<float> normal(0.0f, deviation);
  for (std::size_t i = 0; i < count; ++i) out[i] = normal(random);
}

// An orthogonal matrix by Gram-Schmidt.
inline void fill_rotation(float* out, int size, Random& random) {
  std::normal_distribution<double> normal;
  std::vector<double> rows(static_cast<std::size_t>(size) * size);
  for (int i = 0; i < size; ++i) {
    double* const row = rows.data() + static_cast<std::size_t>(i) * size;
    for (int j = 0; j < size; ++j) row[j] = normal(random);
    for (int pass = 0; pass < 2; ++pass) {
      for (int k = 0; k < i; ++k) {
        const double* const other = rows.data() + static_cast<std::size_t>(k) * size;
        double dot = 0;
        for (int j = 0; j < size; ++j) dot += row[j] * other[j];
        for (int j = 0; j < size; ++j) row[j] -= dot * other[j];
      }
    }
    double norm = 0;
    for (int j = 0; j < size; ++j) norm += row[j] * row[j];
    for (int j = 0; j < size; ++j) row[j] /= std::sqrt(norm);
  }
  for (std::size_t i = 0; i < rows.size(); ++i) out[i] = static_cast<float>(rows[i]);
}

// Antisymmetric and rising, about right for N(0, 1/d); the kernels take any.
inline void fill_codebook(int bits, int head_size, float* centroids, float* boundaries) {
  const int levels = 1 << bits;
  for (int i = 0; i < levels; ++i) {
    const float x = (2.0f * static_cast<float>(i) + 1.0f) / static_cast<float>(levels) - 1.0f;
    centroids[i] = (1.2f * x + 1.3f * x * x * x) / std::sqrt(static_cast<float>(head_size));
  }
  for (int i = 0; i + 1 < levels; ++i) boundaries[i] = 0.5f * (centroids[i] + centroids[i + 1]);
}

// The tests of float32 problems know a codec by its bits alone.
inline bool is_raw(int bits) { return bits == 32; }

inline int row_bytes(int bits, int head_size) {
  return is_raw(bits) ? spec::raw_row_bytes(bits, head_size) : spec::row_bytes(bits, head_size);
}

// Arbitrary bytes with finite scales; floats for raw rows.
inline void fill_rows(uint8_t* rows, std::size_t count, int bits, int head_size, Random& random) {
  if (is_raw(bits)) {
    std::vector<float> vector(static_cast<std::size_t>(head_size));
    for (std::size_t t = 0; t < count; ++t, rows += row_bytes(bits, head_size)) {
      fill_normal(vector.data(), vector.size(), random);
      std::memcpy(rows, vector.data(), vector.size() * sizeof(float));
    }
    return;
  }
  const RowFormat format = row_format(bits, head_size, 1);
  std::uniform_int_distribution<int> byte(0, 255);
  std::uniform_real_distribution<float> scale(0.1f, 12.0f);
  for (std::size_t t = 0; t < count; ++t, rows += format.row_bytes) {
    for (int i = 0; i < format.scale_offset; ++i) rows[i] = static_cast<uint8_t>(byte(random));
    const uint16_t half = float_to_half(scale(random));
    std::memcpy(rows + format.scale_offset, &half, sizeof half);
  }
}

// The code of one coordinate, from the definition of the planes.
inline int code_of(int bits, int head_size, const uint8_t* row, int j) {
  int code = 0;
  const spec::Planes planes = spec::planes(bits);
  for (int p = 0; p < planes.count; ++p) {
    const int width = planes.plane[p].width;
    const int n = spec::plane_bytes(width, head_size);
    const uint8_t byte = row[spec::plane_offset(bits, p, head_size) + j % n];
    code |= ((byte >> (j / n * width)) & ((1 << width) - 1)) << planes.plane[p].shift;
  }
  return code;
}

inline Parallel serial() {
  return {[](void*, void (*task)(void*, std::size_t), std::size_t count, void* argument) {
            for (std::size_t i = 0; i < count; ++i) task(argument, i);
          },
          nullptr};
}

// Four threads that take tasks in whatever order.
inline Parallel threaded() {
  return {[](void*, void (*task)(void*, std::size_t), std::size_t count, void* argument) {
            std::atomic<std::size_t> next{0};
            std::vector<std::thread> threads;
            for (int i = 0; i < 4; ++i) {
              threads.emplace_back([&] {
                for (std::size_t at = next++; at < count; at = next++) task(argument, at);
              });
            }
            for (std::thread& thread : threads) thread.join();
          },
          nullptr};
}

inline std::string describe(const char* level, int bits, int head_size) {
  return std::string(level) + ", " + std::to_string(bits) + " bits, head size " +
         std::to_string(head_size);
}

constexpr int kHeadSizes[] = {8, 16, 24, 40, 64, 80, 96, 128, 192, 256, 512};

}  // namespace tq::test
