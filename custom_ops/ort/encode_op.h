// Both encoders on the CPU; ort/encode_inputs.h says what they take.
#pragma once

#include "core/encode.h"
#include "ort/codec_inputs.h"
#include "ort/custom_op.h"
#include "ort/encode_inputs.h"
#include "ort/feedback_input.h"
#include "ort/rotary_input.h"
#include "ort/window_inputs.h"

namespace tq::ort {

// What a kernel of either encoder keeps.
class EncodeState {
 public:
  const Api& api() const { return api_; }

 protected:
  // The inputs are those of the operator Op.
  template <class Op>
  EncodeState(const Api& api, const OrtKernelInfo* info, Element element, Op);

  // Tables that come with a call.
  struct TableStorage {
    std::vector<float> rotation;
    FeedbackMatrices feedback;
    std::optional<RotaryOffset> rotary_offset;
  };
  // `storage` keeps what is made for this call.
  EncodeCall call_of(const EncodeTensors& tensors, TableStorage& storage) const;
  void run(const EncodeCall& call, OrtKernelContext* context) const;

  Api api_;
  Element element_;
  int float_type_;
  const Kernels& kernels_;
  spec::Codec codec_;
  ReadyRotation rotation_;
  ReadyFeedback feedback_;
  ReadyRotaryOffset rotary_offset_;
  int norm_correction_;
};

class EncodeKernel : public EncodeState {
 public:
  static Signature signature(int float_type) { return signature_of<spec::Encode>(float_type); }

  EncodeKernel(const Api& api, const OrtKernelInfo* info, Element element);
  void compute(OrtKernelContext* context);

 private:
  Window window_;
};

class PagedEncodeKernel : public EncodeState {
 public:
  static Signature signature(int float_type) { return signature_of<spec::PagedEncode>(float_type); }

  PagedEncodeKernel(const Api& api, const OrtKernelInfo* info, Element element);
  void compute(OrtKernelContext* context);

 private:
  PagedWindow window_;
};

}  // namespace tq::ort
