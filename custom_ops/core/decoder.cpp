// Plain loops over blocks of floats; the contract is in decoder.h. Tasks are cut by the shapes, not
// by the threads, and no task needs memory beyond its stack.
#include "core/decoder.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>

namespace tq {
namespace {

constexpr int64_t kBlockFloats = 512;  // that are widened to float32 at a time
constexpr int64_t kFloatsPerTask = 8 * 1024;
constexpr int64_t kBytesPerTask = 64 * 1024;

// Runs body(first, end) for [0, count) in shares of about `per_task` units, of which each of the
// `count` has `units`.
template <class Body>
void for_shares(int64_t count, int64_t units, int64_t per_task, const Parallel& parallel,
                const Body& body) {
  const int64_t share = std::max<int64_t>(1, per_task / std::max<int64_t>(1, units));
  auto task = [&](std::size_t index) {
    const int64_t first = static_cast<int64_t>(index) * share;
    body(first, std::min(first + share, count));
  };
  parallel(static_cast<std::size_t>((count + share - 1) / share), task);
}

// Runs body(first, size) for the blocks of [0, count).
template <class Body>
void for_blocks(int64_t count, const Body& body) {
  for (int64_t first = 0; first < count; first += kBlockFloats) {
    body(first, static_cast<std::size_t>(std::min(kBlockFloats, count - first)));
  }
}

// Floats of one element type, read and written a block at a time.
struct Floats {
  const Kernels& kernels;
  Element element;

  void load(const void* in, int64_t offset, float* out, std::size_t count) const {
    load_floats(kernels, element, in, static_cast<std::size_t>(offset), out, count);
  }
  void store(const float* in, void* out, int64_t offset, std::size_t count) const {
    store_floats(kernels, element, in, out, static_cast<std::size_t>(offset), count);
  }
};

// Partial sums make it more exact than one after the other, and a compiler can do them at once.
void add_squares(const float* x, std::size_t count, float* sums) {
  std::size_t i = 0;
  for (; i + kPartialSums <= count; i += kPartialSums) {
    for (std::size_t j = 0; j < kPartialSums; ++j) sums[j] += x[i + j] * x[i + j];
  }
  for (std::size_t j = 0; i + j < count; ++j) sums[j] += x[i + j] * x[i + j];
}

void normalise_row(const Floats& floats, const RmsNormalizationCall& call, int64_t row) {
  const int64_t begin = row * call.width;
  alignas(64) float x[kBlockFloats], scale[kBlockFloats], sums[kPartialSums] = {};
  for_blocks(call.width, [&](int64_t first, std::size_t count) {
    floats.load(call.x, begin + first, x, count);
    add_squares(x, count, sums);
  });
  float sum = 0.0f;
  for (const float one : sums) sum += one;
  const float length = std::sqrt(sum / static_cast<float>(call.width) + call.epsilon);
  for_blocks(call.width, [&](int64_t first, std::size_t count) {
    floats.load(call.x, begin + first, x, count);
    floats.load(call.scale, first, scale, count);
    for (std::size_t i = 0; i < count; ++i) x[i] = x[i] / length * scale[i];
    floats.store(x, call.y, begin + first, count);
  });
}

void rotate_vector(const Floats& floats, const RotaryEmbeddingCall& call, int64_t vector) {
  const int64_t half = call.head_size / 2, begin = vector * call.head_size;
  const int64_t sequence = vector / call.tokens / call.heads;
  const int64_t row = (call.positions_per_batch ? sequence : 0) * call.tokens;
  const int64_t angles = call.positions[row + vector % call.tokens] * half;
  alignas(64) float x1[kBlockFloats], x2[kBlockFloats], y1[kBlockFloats], y2[kBlockFloats];
  for_blocks(half, [&](int64_t first, std::size_t count) {
    floats.load(call.x, begin + first, x1, count);
    floats.load(call.x, begin + half + first, x2, count);
    const float* const cosines = call.cosines + angles + first;
    const float* const sines = call.sines + angles + first;
    for (std::size_t i = 0; i < count; ++i) {
      y1[i] = x1[i] * cosines[i] - x2[i] * sines[i];
      y2[i] = x2[i] * cosines[i] + x1[i] * sines[i];
    }
    floats.store(y1, call.y, begin + first, count);
    floats.store(y2, call.y, begin + half + first, count);
  });
}

}  // namespace

void rms_normalization(const Kernels& kernels, const RmsNormalizationCall& call,
                       const Parallel& parallel) {
  const Floats floats{kernels, call.element};
  for_shares(call.rows, call.width, kFloatsPerTask, parallel, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row) normalise_row(floats, call, row);
  });
}

void rotary_embedding(const Kernels& kernels, const RotaryEmbeddingCall& call,
                      const Parallel& parallel) {
  const Floats floats{kernels, call.element};
  const int64_t vectors = call.batch * call.heads * call.tokens;
  for_shares(vectors, call.head_size, kFloatsPerTask, parallel, [&](int64_t first, int64_t end) {
    for (int64_t vector = first; vector < end; ++vector) rotate_vector(floats, call, vector);
  });
}

void swish(const Kernels& kernels, const SwishCall& call, const Parallel& parallel) {
  const Floats floats{kernels, call.element};
  const int64_t blocks = (call.count + kBlockFloats - 1) / kBlockFloats;
  for_shares(blocks, kBlockFloats, kFloatsPerTask, parallel, [&](int64_t from, int64_t to) {
    const int64_t begin = from * kBlockFloats, end = std::min(to * kBlockFloats, call.count);
    alignas(64) float x[kBlockFloats];
    for_blocks(end - begin, [&](int64_t first, std::size_t count) {
      floats.load(call.x, begin + first, x, count);
      for (std::size_t i = 0; i < count; ++i) x[i] = x[i] / (1.0f + std::exp(-x[i]));
      floats.store(x, call.y, begin + first, count);
    });
  });
}

void transpose(const TransposeCall& call, const Parallel& parallel) {
  const int64_t area = call.rows * call.columns;
  const std::size_t bytes = static_cast<std::size_t>(call.bytes);
  // By what is written: the vectors of y, one after the other.
  for_shares(
      call.batch * area, call.bytes, kBytesPerTask, parallel, [&](int64_t first, int64_t end) {
        for (int64_t to = first; to < end; ++to) {
          const int64_t batch = to / area, column = to % area / call.rows, row = to % call.rows;
          const int64_t from = batch * area + row * call.columns + column;
          std::memcpy(call.y + to * call.bytes, call.x + from * call.bytes, bytes);
        }
      });
}

void gather(const GatherCall& call, const Parallel& parallel) {
  const std::size_t bytes = static_cast<std::size_t>(call.bytes);
  for_shares(call.count, call.bytes, kBytesPerTask, parallel, [&](int64_t first, int64_t end) {
    for (int64_t to = first; to < end; ++to) {
      const int64_t index = call.indices[to], row = index < 0 ? index + call.rows : index;
      std::memcpy(call.y + to * call.bytes, call.data + row * call.bytes, bytes);
    }
  });
}

}  // namespace tq
