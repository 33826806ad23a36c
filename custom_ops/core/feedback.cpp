// L in whole steps: sums of products with a codebook of whole numbers are exact then, in any order
// and on any instruction set. The contract is in feedback.h.
#include "core/feedback.h"

#include <algorithm>
#include <cmath>

#include "core/row_format.h"

namespace tq {
namespace {

int padded(int size) { return (size + kFeedbackColumns - 1) / kFeedbackColumns * kFeedbackColumns; }

// Whole steps, at most kFeedbackSteps of them; what is no number is none.
float whole_steps(float factor, float step) {
  const float steps = step > 0.0f ? std::nearbyint(factor / step) : 0.0f;
  if (std::isnan(steps)) return 0.0f;
  const float most = kFeedbackSteps;
  return std::min(std::max(steps, -most), most);
}

}  // namespace

FeedbackMatrices::FeedbackMatrices(const float* matrices, int64_t heads, spec::Codec codec,
                                   int head_size, bool as_bytes) {
  const int classes = spec::classes(codec.kind);
  const std::size_t d = static_cast<std::size_t>(head_size), n = static_cast<std::size_t>(heads);
  std::size_t columns = 0, floats = 0, bytes = 0;  // of all classes of a head
  for (int k = 0; k < classes; ++k) {
    const int size = spec::class_size(codec, k, head_size);
    const std::size_t wide = static_cast<std::size_t>(padded(size));
    columns += wide;
    floats += static_cast<std::size_t>(size) * static_cast<std::size_t>(size);
    bytes += wide * wide;
  }
  steps_.resize(n * columns);
  weights_.resize(n * columns);
  starts_.resize(as_bytes ? n * columns : 0);
  bytes_.resize(as_bytes ? n * bytes : 0);
  lower_.resize(as_bytes ? 0 : n * floats);
  std::size_t column = 0, at_byte = 0, at_float = 0, first = 0;
  for (int k = 0; k < classes; ++k) {
    const std::size_t size = static_cast<std::size_t>(spec::class_size(codec, k, head_size));
    const std::size_t wide = static_cast<std::size_t>(padded(static_cast<int>(size)));
    for (std::size_t head = 0; head < n; ++head) {
      float* const lower = as_bytes ? nullptr : lower_.data() + at_float;
      int8_t* const own = as_bytes ? bytes_.data() + at_byte : nullptr;
      int32_t* const starts = as_bytes ? starts_.data() + column : nullptr;
      float* const steps = steps_.data() + column;
      float* const weights = weights_.data() + column;
      fill(matrices + head * d * d + first * (d + 1), d, size, lower, own, starts, steps, weights);
      heads_.push_back({lower, own, starts, steps, weights});
      column += wide;
      at_byte += wide * wide;
      at_float += size * size;
    }
    first += size;
  }
}

void FeedbackMatrices::fill(const float* matrix, std::size_t pitch, std::size_t size, float* lower,
                            int8_t* bytes, int32_t* starts, float* steps, float* weights) {
  const std::size_t columns = static_cast<std::size_t>(padded(static_cast<int>(size)));
  for (std::size_t j = 0; j < size; ++j) {
    weights[j] = matrix[j * pitch + j];
    float largest = 0.0f;
    for (std::size_t i = j + 1; i < size; ++i) {
      largest = std::max(largest, std::fabs(matrix[i * pitch + j]));
    }
    steps[j] = largest / kFeedbackSteps;
    for (std::size_t i = j + 1; i < size; ++i) {
      const float whole = whole_steps(matrix[i * pitch + j], steps[j]);
      if (bytes == nullptr) {
        lower[i * size + j] = whole;
        continue;
      }
      const std::size_t block = j / kFeedbackColumns * columns / 4 + i / 4;
      bytes[(block * kFeedbackColumns + j % kFeedbackColumns) * 4 + i % 4] =
          static_cast<int8_t>(whole);
      starts[j] -= kFeedbackZero * static_cast<int32_t>(whole);
    }
  }
}

bool FeedbackMatrices::as_bytes(const Kernels& kernels, spec::Codec codec, const float* centroids) {
  if (kernels.search_bytes == nullptr) return false;
  for (int k = 0; k < spec::classes(codec.kind); ++k) {
    const int levels = 1 << spec::index_bits(codec, k);
    float table[kTable];
    fill_table(centroids, levels, table);
    if (!encoder_integers(table, levels).has_value()) return false;
    centroids += levels;
  }
  return true;
}

}  // namespace tq
