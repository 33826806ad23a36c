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

FeedbackMatrices::FeedbackMatrices(const float* matrices, int64_t heads, int head_size,
                                   bool as_bytes) {
  const std::size_t size = static_cast<std::size_t>(head_size), n = static_cast<std::size_t>(heads);
  const std::size_t columns = static_cast<std::size_t>(padded(head_size));
  steps_.resize(n * columns);
  weights_.resize(n * columns);
  starts_.resize(as_bytes ? n * columns : 0);
  bytes_.resize(as_bytes ? n * columns * columns : 0);
  lower_.resize(as_bytes ? 0 : n * size * size);
  for (std::size_t head = 0; head < n; ++head) {
    float* const lower = as_bytes ? nullptr : lower_.data() + head * size * size;
    int8_t* const bytes = as_bytes ? bytes_.data() + head * columns * columns : nullptr;
    int32_t* const starts = as_bytes ? starts_.data() + head * columns : nullptr;
    float* const steps = steps_.data() + head * columns;
    float* const weights = weights_.data() + head * columns;
    fill(matrices + head * size * size, size, lower, bytes, starts, steps, weights);
    heads_.push_back({lower, bytes, starts, steps, weights});
  }
}

void FeedbackMatrices::fill(const float* matrix, std::size_t size, float* lower, int8_t* bytes,
                            int32_t* starts, float* steps, float* weights) {
  const std::size_t columns = static_cast<std::size_t>(padded(static_cast<int>(size)));
  for (std::size_t j = 0; j < size; ++j) {
    weights[j] = matrix[j * size + j];
    float largest = 0.0f;
    for (std::size_t i = j + 1; i < size; ++i) {
      largest = std::max(largest, std::fabs(matrix[i * size + j]));
    }
    steps[j] = largest / kFeedbackSteps;
    for (std::size_t i = j + 1; i < size; ++i) {
      const float whole = whole_steps(matrix[i * size + j], steps[j]);
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
  float table[kTable];
  fill_table(centroids, spec::levels(codec), table);
  return encoder_integers(table, spec::levels(codec)).has_value();
}

}  // namespace tq
