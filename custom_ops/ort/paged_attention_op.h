// TurboQuantPagedDequantAttention(query [1, H, T, D], key_cache uint8 [P, S, N, Wk],
//     value_cache uint8 [P, S, N, Wv], cumulative_sequence_length int32 [R + 1],
//     past_seqlens int32 [R], block_table int32 [R, C], key_rotation, key_centroids,
//     value_rotation, value_centroids, head_sink [H] (optional), key_offset, value_offset (both or
//     neither))
//   -> [1, H, T, D]
// Tables are as those of TurboQuantDequantAttention (ort/attention_op.h). Bytes of a page are
// [N, S, W].
// Refuses: another shape, rank or type, rows that are narrower than the codec's, H not a multiple
// of N, and what ort/paging_inputs.h says.
#pragma once

#include "ort/attention_op.h"
#include "ort/custom_op.h"

namespace tq::ort {

class PagedAttentionKernel {
 public:
  static Signature signature(int float_type);

  PagedAttentionKernel(const Api& api, const OrtKernelInfo* info, Element element);
  void compute(OrtKernelContext* context);
  const Api& api() const { return api_; }

 private:
  Api api_;
  Element element_;
  int float_type_;
  const Kernels& kernels_;
  AttentionAttributes attributes_;
  float skip_below_;
  ReadyRotation key_rotation_, value_rotation_;
};

}  // namespace tq::ort
