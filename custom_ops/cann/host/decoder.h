// The decoder's own operators on the stream of CANNExecutionProvider. Same contract as
// ort/decoder_inputs.h, less what limits.h refuses and heads of RotaryEmbedding that are not of 64 or
// 128.
//
// position_ids and indices stay on the host, which checks all of them before anything is enqueued.
#pragma once

#include <type_traits>

#include "cann/host/limits.h"
#include "cann/host/operators.h"
#include "ort/decoder_inputs.h"

namespace tq::cann {

// Refuses other elements. CANN's operators compute (aclnn.h), but for RotaryEmbedding where there are
// kernels of ours: CANN's takes five launches for what is one of ours.
template <class Op>
class DecoderKernel : public DeviceKernel {
 public:
  static ort::Signature signature(int float_type) {
    const ort::Signature signature = ort::signature_of<Op>(float_type);
    if constexpr (kIs<spec::RotaryEmbedding>) return on_device(signature, {Op::kPositionIds});
    if constexpr (kIs<spec::Gather>) return on_device(signature, {Op::kIndices});
    return on_device(signature);
  }

  DecoderKernel(const ort::Api& api, const OrtKernelInfo* info, Element element)
      : DeviceKernel(api, element) {
    expect_element(Op::kName, float_type_);
    library_ = &kernel_library(Op::kName);
    if (vendor_ == nullptr) {
      throw ort::OpError(
          std::string(Op::kName) + " on " + kProvider +
          ": there is no libopapi.so in this process, expected the operators of CANN");
    }
    if constexpr (kIs<spec::RmsNormalization>) epsilon_ = ort::read_epsilon(api, info);
    if constexpr (kIs<spec::Transpose>) ort::expect_perm(api, info);
  }

  void compute(OrtKernelContext* context);

 private:
  template <class Other>
  static constexpr bool kIs = std::is_same_v<Op, Other>;

  AclType type() const { return element_ == Element::kFloat ? AclType::kFloat : AclType::kFloat16; }
  VendorCall vendor_call(const OrtKernelContext* context, void* stream) const {
    return VendorCall(*vendor_, api_, context, Op::kName, Op::kInputs[0], stream);
  }

  const Aclnn* const vendor_ = Aclnn::find();
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

}  // namespace tq::cann
