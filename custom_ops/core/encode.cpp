// Encode in two parallel regions: what is not new is copied (or stays, in place), then new rows are
// written. A row: norm, division, rotation, codes, packing, float16 scale. Each element of the
// rotation is one chain of fused multiply-adds over rising k and sums of squares add in one fixed
// tree, so the bytes depend on neither the threads, nor the instruction set, nor the batch. A row
// of the codec raw is a copy.
#include "core/encode.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/row_format.h"

namespace tq {
namespace {

constexpr int kRowsPerTask = 8;
constexpr int64_t kCopyBytesPerTask = 256 * 1024;

void pack(const RowFormat& format, const uint8_t* codes, uint8_t* row) {
  const int n = format.slot_size;
  switch (format.bits) {
    case 4:
      for (int i = 0; i < n; ++i) row[i] = static_cast<uint8_t>(codes[i] | codes[i + n] << 4);
      return;
    case 2:
      for (int i = 0; i < n; ++i) {
        row[i] = static_cast<uint8_t>(codes[i] | codes[i + n] << 2 | codes[i + 2 * n] << 4 |
                                      codes[i + 3 * n] << 6);
      }
      return;
    default:
      for (int i = 0; i < 2 * n; ++i) {
        row[i] = static_cast<uint8_t>((codes[i] & 3) | (codes[i + 2 * n] & 3) << 2 |
                                      (codes[i + 4 * n] & 3) << 4 | (codes[i + 6 * n] & 3) << 6);
      }
      for (int i = 0; i < n; ++i) {
        unsigned high = 0;
        for (int slot = 0; slot < 8; ++slot) high |= (codes[i + slot * n] >> 2 & 1u) << slot;
        row[format.high_plane + i] = static_cast<uint8_t>(high);
      }
  }
}

uint16_t row_scale(float norm, float centroid_squares, bool norm_correction) {
  if (norm == 0.0f) return 0;
  float scale = norm_correction ? norm / std::sqrt(centroid_squares) : norm;
  if (!(scale <= spec::kMaxScale)) scale = spec::kMaxScale;
  return float_to_half(scale);
}

uint8_t* destination(const EncodeCall& call, int row_bytes, int64_t row) {
  const int64_t lane = row / call.tokens;  // b * N + n
  const int64_t length = call.past_length[call.length_per_batch ? lane / call.heads : 0];
  const int64_t slot = length + row % call.tokens;
  return call.present + (lane * call.present_slots + slot) * row_bytes;
}

struct RawWriter {
  const Kernels& kernels;
  const EncodeCall& call;
  int row_bytes;
  int64_t rows;

  void operator()(std::size_t task) const {
    const int64_t first = static_cast<int64_t>(task) * kRowsPerTask;
    const int64_t end = std::min(first + kRowsPerTask, rows);
    const Element element = raw_element(call.element, call.bits);
    const uint8_t* const vectors = static_cast<const uint8_t*>(call.vectors);
    for (int64_t row = first; row < end; ++row) {
      if (element != call.element) {
        narrow(element, row);
        continue;
      }
      std::memcpy(destination(call, row_bytes, row), vectors + row * row_bytes,
                  static_cast<std::size_t>(row_bytes));
    }
  }

  // The cache may lie at any address, the conversions want whole elements.
  void narrow(Element element, int64_t row) const {
    alignas(64) uint16_t aligned[spec::kMaxHeadSize];
    const float* const vector = static_cast<const float*>(call.vectors) + row * call.head_size;
    store_floats(kernels, element, vector, aligned, 0, static_cast<std::size_t>(call.head_size));
    std::memcpy(destination(call, row_bytes, row), aligned, static_cast<std::size_t>(row_bytes));
  }
};

struct Encoder {
  const Kernels& kernels;
  const EncodeCall& call;
  RowFormat format;
  float table[kTable];
  int64_t rows;

  void operator()(std::size_t task) const {
    const int64_t first = static_cast<int64_t>(task) * kRowsPerTask;
    const int count = static_cast<int>(std::min<int64_t>(kRowsPerTask, rows - first));
    const int size = call.head_size;
    alignas(64) float unit[kRowsPerTask * spec::kMaxHeadSize];
    alignas(64) float rotated[kRowsPerTask * spec::kMaxHeadSize];
    alignas(64) uint8_t codes[spec::kMaxHeadSize];
    float norm[kRowsPerTask];
    load_floats(kernels, call.element, call.vectors, static_cast<std::size_t>(first * size), unit,
                static_cast<std::size_t>(count) * size);
    for (int r = 0; r < count; ++r) {
      float* const x = unit + r * size;
      norm[r] = std::sqrt(kernels.sum_squares(x, size));
      if (!std::isfinite(norm[r])) norm[r] = 0.0f;
      if (norm[r] == 0.0f) {
        std::memset(x, 0, size * sizeof(float));
      } else {
        kernels.divide(x, norm[r], x, size);
      }
    }
    kernels.rotate(unit, call.rotation, rotated, count, size);
    for (int r = 0; r < count; ++r) {
      uint8_t* const row = destination(call, format.row_bytes, first + r);
      const float squares = kernels.quantise(rotated + r * size, call.boundaries, 1 << call.bits,
                                             table, codes, size);
      pack(format, codes, row);
      const uint16_t scale = row_scale(norm[r], squares, call.norm_correction);
      std::memcpy(row + format.scale_offset, &scale, sizeof scale);
    }
  }
};

// Everything but the new rows: slots of the past, and zeros beyond them.
struct Copier {
  const EncodeCall& call;
  int row_bytes;
  int64_t slots_per_task, tasks_per_lane;

  void operator()(std::size_t task) const {
    const int64_t lane = static_cast<int64_t>(task) / tasks_per_lane;
    const int64_t from = static_cast<int64_t>(task) % tasks_per_lane * slots_per_task;
    const int64_t to = std::min(from + slots_per_task, call.present_slots);
    const int64_t begin = call.past_length[call.length_per_batch ? lane / call.heads : 0];
    const int64_t end = begin + call.tokens;
    fill(lane, from, std::min(to, begin));
    fill(lane, std::max(from, end), to);
  }

  void fill(int64_t lane, int64_t from, int64_t to) const {
    uint8_t* const out = call.present + lane * call.present_slots * row_bytes;
    const int64_t copied = std::min(to, call.past_slots);
    if (from < copied) {
      std::memcpy(out + from * row_bytes,
                  call.past + (lane * call.past_slots + from) * row_bytes,
                  static_cast<std::size_t>((copied - from) * row_bytes));
    }
    const int64_t zeroed = std::max(from, copied);
    if (zeroed < to) {
      std::memset(out + zeroed * row_bytes, 0, static_cast<std::size_t>((to - zeroed) * row_bytes));
    }
  }
};

}  // namespace

void encode(const Kernels& kernels, const EncodeCall& call, const Parallel& parallel) {
  const RowFormat format =
      call.raw
          ? raw_row_format(call.bits / 8, call.head_size, 1)
          : row_format(call.bits, call.head_size, 1);
  if (call.batch == 0 || call.heads == 0) return;
  const int64_t lanes = call.batch * call.heads;
  const bool in_place = call.present == call.past && call.present_slots == call.past_slots;
  if (!in_place) {
    const int64_t slots = std::max<int64_t>(1, kCopyBytesPerTask / format.row_bytes);
    Copier copier{call, format.row_bytes, slots, (call.present_slots + slots - 1) / slots};
    parallel(static_cast<std::size_t>(lanes * copier.tasks_per_lane), copier);
  }
  const int64_t rows = lanes * call.tokens;
  const std::size_t tasks = static_cast<std::size_t>((rows + kRowsPerTask - 1) / kRowsPerTask);
  if (call.raw) {
    RawWriter writer{kernels, call, format.row_bytes, rows};
    parallel(tasks, writer);
    return;
  }
  Encoder encoder{kernels, call, format, {}, rows};
  fill_table(call.centroids, call.bits, encoder.table);
  parallel(tasks, encoder);
}

}  // namespace tq
