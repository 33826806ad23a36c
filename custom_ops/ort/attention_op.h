// TurboQuantDequantAttention(query [B, H, T, D], key_cache uint8 [B, N, S, Wk],
//                            value_cache uint8 [B, N, S, Wv], past_length int64 [B] or [1],
//                            key_rotation f32 [D, D], key_centroids f32, value_rotation f32 [D, D],
//                            value_centroids f32, attention_bias (optional))
//   -> [B, H, T, D]
// For caches of the codec raw, rotation and centroids are floats of any shape, and not read.
// Refuses: another shape, rank or type, rows of another width, H not a multiple of N, a past_length
// that is negative or leaves fewer than T slots, a bias that does not broadcast.
#pragma once

#include <vector>

#include "ort/custom_op.h"

namespace tq::ort {

class AttentionKernel {
 public:
  static Signature signature(int float_type);

  AttentionKernel(const Api& api, const OrtKernelInfo* info, Element element);
  void compute(OrtKernelContext* context);
  const Api& api() const { return api_; }

 private:
  // Null where the values are not rotated.
  const float* transposed(const Tensor& value_rotation, std::vector<float>& own) const;

  Api api_;
  Element element_;
  int float_type_;
  const Kernels& kernels_;
  Codec key_, value_;
  float scale_, softcap_;
  bool causal_;
  int64_t sliding_window_;
  std::vector<float> constant_transposed_;  // empty unless the value rotation is a constant
};

}  // namespace tq::ort
