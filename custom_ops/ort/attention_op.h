// Both attention operators on the CPU; ort/attention_inputs.h says what they take.
#pragma once

#include "ort/attention_inputs.h"
#include "ort/codec_inputs.h"
#include "ort/custom_op.h"
#include "ort/rotary_input.h"

namespace tq::ort {

// Environment variable: values whose weights are all below this share of the largest are skipped.
inline constexpr char kSkipVariable[] = "TQ_ONNX_SKIP_BELOW";
inline constexpr float kSkipBelow = 1e-4f;  // by default

// What a kernel of either operator keeps.
class AttentionState {
 public:
  const Api& api() const { return api_; }

 protected:
  // The inputs are those of the operator Op.
  template <class Op>
  AttentionState(const Api& api, const OrtKernelInfo* info, Element element, Op,
                 const AttentionAttributes& attributes);

  // Tables that come with a call.
  struct TableStorage {
    std::vector<float> key, value;
    std::optional<RotaryOffset> rotary_offset;
  };
  // `storage` keeps what is made for this call.
  AttentionCall call_of(const AttentionTensors& tensors, TableStorage& storage) const;

  Api api_;
  Element element_;
  int float_type_;
  const Kernels& kernels_;
  AttentionAttributes attributes_;
  float skip_below_;
  ReadyRotation key_rotation_, value_rotation_;
  ReadyRotaryOffset rotary_offset_;
};

class AttentionKernel : public AttentionState {
 public:
  static Signature signature(int float_type) { return signature_of<spec::Attention>(float_type); }

  AttentionKernel(const Api& api, const OrtKernelInfo* info, Element element);
  void compute(OrtKernelContext* context);
};

class PagedAttentionKernel : public AttentionState {
 public:
  static Signature signature(int float_type) {
    return signature_of<spec::PagedAttention>(float_type);
  }

  PagedAttentionKernel(const Api& api, const OrtKernelInfo* info, Element element);
  void compute(OrtKernelContext* context);
};

}  // namespace tq::ort
