// TurboQuantPagedEncode(vectors [1, N, T, D], past uint8 [P, S, N, W],
//     cumulative_sequence_length int32 [R + 1], past_seqlens int32 [R], block_table int32 [R, C],
//     rotation, centroids, boundaries, offset, gains, feedback (the last three optional))
//   -> present uint8 [P, S, N, W]
// Tables are as those of TurboQuantEncode (ort/encode_op.h). Bytes of a page are [N, S, W].
// Refuses: another shape, rank or type, rows that are narrower than the codec's, a present that
// overlaps past without being the same buffer, and what ort/paging_inputs.h says.
#pragma once

#include "ort/codec_inputs.h"
#include "ort/custom_op.h"
#include "ort/feedback_input.h"

namespace tq::ort {

class PagedEncodeKernel {
 public:
  static Signature signature(int float_type);

  PagedEncodeKernel(const Api& api, const OrtKernelInfo* info, Element element);
  void compute(OrtKernelContext* context);
  const Api& api() const { return api_; }

 private:
  Api api_;
  Element element_;
  int float_type_;
  const Kernels& kernels_;
  spec::Codec codec_;
  ReadyRotation rotation_;
  ReadyFeedback feedback_;
  int norm_correction_;
};

}  // namespace tq::ort
