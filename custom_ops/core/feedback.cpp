// L in whole steps: sums of products with a codebook of whole numbers are exact then, in any order
// and on any instruction set. The contract is in feedback.h.
#include "core/feedback.h"

#include <algorithm>
#include <cmath>

#include "core/row_format.h"

namespace tq {
namespace {

int padded(int size) {
  return (size + kFeedbackColumns - 1) / kFeedbackColumns * kFeedbackColumns;
}

// Whole steps, at most kFeedbackSteps of them; what is no number is none.
float whole_steps(float factor, float step) {
  const float steps = step > 0.0f ? std::nearbyint(factor / step) : 0.0f;
  if (std::isnan(steps)) return 0.0f;
  const float most = kFeedbackSteps;
  return std::min(std::max(steps, -most), most);
}

}  // namespace

FeedbackMatrices::FeedbackMatrices(const float* matrices, int64_t heads, int size, bool as_bytes)
    : heads_(static_cast<std::size_t>(heads)) {
  const std::size_t d = static_cast<std::size_t>(size);
  const std::size_t columns = static_cast<std::size_t>(padded(size));
  steps_.resize(heads_.size() * columns);
  weights_.resize(heads_.size() * columns);
  if (as_bytes) {
    bytes_.resize(heads_.size() * columns * columns);
    starts_.resize(heads_.size() * columns);
  } else {
    lower_.resize(heads_.size() * d * d);
  }
  for (std::size_t n = 0; n < heads_.size(); ++n, matrices += d * d) {
    float* const steps = steps_.data() + n * columns;
    float* const weights = weights_.data() + n * columns;
    float* const lower = lower_.data() + n * d * d;
    int8_t* const bytes = bytes_.data() + n * columns * columns;
    int32_t* const starts = starts_.data() + n * columns;
    heads_[n] = {as_bytes ? nullptr : lower, as_bytes ? bytes : nullptr, starts, steps, weights};
    for (std::size_t j = 0; j < d; ++j) {
      weights[j] = matrices[j * d + j];
      float largest = 0.0f;
      for (std::size_t i = j + 1; i < d; ++i) {
        largest = std::max(largest, std::fabs(matrices[i * d + j]));
      }
      steps[j] = largest / kFeedbackSteps;
      for (std::size_t i = j + 1; i < d; ++i) {
        const float whole = whole_steps(matrices[i * d + j], steps[j]);
        if (!as_bytes) {
          lower[i * d + j] = whole;
          continue;
        }
        const std::size_t block = j / kFeedbackColumns * columns / 4 + i / 4;
        bytes[(block * kFeedbackColumns + j % kFeedbackColumns) * 4 + i % 4] =
            static_cast<int8_t>(whole);
        starts[j] -= kFeedbackZero * static_cast<int32_t>(whole);
      }
    }
  }
}

bool FeedbackMatrices::as_bytes(const Kernels& kernels, const float* centroids, int levels) {
  float table[kTable];
  fill_table(centroids, levels, table);
  return kernels.search_bytes != nullptr &&
         integers_of(table, levels, kLargestInteger).has_value();
}

}  // namespace tq
