// The decoder's own operators on the CPU; their contracts are in decoder_inputs.h.
#pragma once

#include <type_traits>

#include "ort/decoder_inputs.h"

namespace tq::ort {

template <class Op>
class DecoderKernel {
 public:
  static Signature signature(int float_type) { return signature_of<Op>(float_type); }

  DecoderKernel(const Api& api, const OrtKernelInfo* info, Element element)
      : api_(api), element_(element), kernels_(choose_kernels(Op::kName)) {
    if constexpr (std::is_same_v<Op, spec::RmsNormalization>) epsilon_ = read_epsilon(api, info);
    if constexpr (std::is_same_v<Op, spec::Transpose>) expect_perm(api, info);
  }
  void compute(OrtKernelContext* context);
  const Api& api() const { return api_; }

 private:
  Api api_;
  Element element_;
  const Kernels& kernels_;
  float epsilon_ = 0;
};

template <>
void DecoderKernel<spec::RmsNormalization>::compute(OrtKernelContext* context);
template <>
void DecoderKernel<spec::RotaryEmbedding>::compute(OrtKernelContext* context);
template <>
void DecoderKernel<spec::Swish>::compute(OrtKernelContext* context);
template <>
void DecoderKernel<spec::Transpose>::compute(OrtKernelContext* context);
template <>
void DecoderKernel<spec::Gather>::compute(OrtKernelContext* context);

}  // namespace tq::ort
