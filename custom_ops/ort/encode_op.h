// TurboQuantEncode(vectors [B, N, T, D], past uint8 [B, N, P, W], past_length int64 [B] or [1],
//                  rotation f32 [D, C] or [N, D, D], centroids f32 [L], boundaries f32 [L - 1],
//                  offset f32 [O, N, D], gains f32 [G], feedback f32 [N, D, D] (all optional))
//   -> present uint8 [B, N, S, W],  S = max(P, overlay_rows + max_b(past_length[b]) + T)
// C is D, for prod 2 D, which has no matrix of each head. Split kinds have L - 2 boundaries: L counts
// the centroids of both classes. Of a codec that does not rotate, rotation, centroids and boundaries
// are floats of any shape, and not read; likewise gains and feedback of one that does not search. A
// feedback of one number is none.
// Refuses: another shape, rank or type, a head size without room for two classes where the codec has
// these, rows that are narrower than the codec's, a past_length that is negative or beyond P, a
// present that overlaps past without being the same buffer of the same shape, more than kMaxOffsets
// rows of an offset, no gain or more than spec::kMaxGains, a window without room for its entries.
#pragma once

#include "ort/codec_inputs.h"
#include "ort/custom_op.h"
#include "ort/feedback_input.h"
#include "ort/window_inputs.h"

namespace tq::ort {

// The tensors of one call, checked. Only the lengths were read: the rest may be on a device.
struct EncodeTensors {
  Tensor vectors, past, past_length, rotation, centroids, boundaries, offset, gains, feedback, present;
  int64_t batch, heads, tokens;
  int64_t slots, total;  // of past and of present
  int64_t offsets;
  int head_size, width;
  int gain_count;
  bool has_feedback;

  bool in_place() const { return present.data == past.data && total == slots; }
};

EncodeTensors read_encode(const Api& api, OrtKernelContext* context, spec::Codec codec,
                          const Window& window, int float_type);

int read_norm_correction(const Api& api, const OrtKernelInfo* info, const char* op);

class EncodeKernel {
 public:
  static Signature signature(int float_type);

  EncodeKernel(const Api& api, const OrtKernelInfo* info, Element element);
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
  Window window_;
};

}  // namespace tq::ort
