// Matrices of error feedback in the form that an encoder takes (tq_onnx/codec/feedback.py).
#pragma once

#include <cstdint>
#include <vector>

#include "core/kernels.h"
#include "tq/codec_spec.h"

namespace tq {

class FeedbackMatrices {
 public:
  FeedbackMatrices() = default;
  // Of matrices [heads, D, D]: L below the diagonal, h on it. As bytes only, or as floats only.
  FeedbackMatrices(const float* matrices, int64_t heads, int head_size, bool as_bytes);

  // Whether a level wants bytes for this codebook.
  static bool as_bytes(const Kernels& kernels, spec::Codec codec, const float* centroids);

  // One for each head, as long as this object lives.
  const Feedback* heads() const { return heads_.data(); }
  bool is_empty() const { return heads_.empty(); }

 private:
  // Of a matrix; its arrays are given.
  static void fill(const float* matrix, std::size_t size, float* lower, int8_t* bytes,
                   int32_t* starts, float* steps, float* weights);

  std::vector<Feedback> heads_;
  std::vector<float> lower_, steps_, weights_;
  std::vector<int8_t> bytes_;
  std::vector<int32_t> starts_;
};

}  // namespace tq
