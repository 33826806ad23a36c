// The decoder's own operators on the stream of CANNExecutionProvider. Same contract as
// ort/decoder_inputs.h, less what limits.h refuses and
//
//   RMSNormalization  E is a multiple of 16 and at most 65,536
//   RotaryEmbedding   D is 64 or 128
//   Swish             the number of elements is a multiple of 16
//   Transpose         a vector has a multiple of 32 bytes, at most 65,536, unless A or C is 1
//
// position_ids and indices stay on the host, which checks all of them before anything is enqueued.
#pragma once

#include "cann/host/aclnn.h"
#include "cann/host/operators.h"
#include "ort/decoder_inputs.h"

namespace tq::cann {

// Refuses other elements. CANN's operators compute (aclnn.h), but for RotaryEmbedding where there are
// kernels of ours: CANN's takes five launches for what is one of ours.
class DecoderKernel : public DeviceKernel {
 protected:
  DecoderKernel(const ort::Api& api, const char* op, Element element);

  const Aclnn* const vendor_ = Aclnn::find();
  AclType type() const { return element_ == Element::kFloat ? AclType::kFloat : AclType::kFloat16; }
};

class RmsNormalizationKernel : public DecoderKernel {
 public:
  static ort::Signature signature(int float_type);

  RmsNormalizationKernel(const ort::Api& api, const OrtKernelInfo* info, Element element);
  void compute(OrtKernelContext* context);

 private:
  float epsilon_;
};

class RotaryEmbeddingKernel : public DecoderKernel {
 public:
  static ort::Signature signature(int float_type);

  RotaryEmbeddingKernel(const ort::Api& api, const OrtKernelInfo* info, Element element);
  void compute(OrtKernelContext* context);

 private:
  void rotate_by_vendor(OrtKernelContext* context, const ort::RotaryEmbeddingTensors& call,
                        void* stream) const;
};

class SwishKernel : public DecoderKernel {
 public:
  static ort::Signature signature(int float_type);

  SwishKernel(const ort::Api& api, const OrtKernelInfo* info, Element element);
  void compute(OrtKernelContext* context);
};

class TransposeKernel : public DecoderKernel {
 public:
  static ort::Signature signature(int float_type);

  TransposeKernel(const ort::Api& api, const OrtKernelInfo* info, Element element);
  void compute(OrtKernelContext* context);
};

class GatherKernel : public DecoderKernel {
 public:
  static ort::Signature signature(int float_type);

  GatherKernel(const ort::Api& api, const OrtKernelInfo* info, Element element);
  void compute(OrtKernelContext* context);
};

}  // namespace tq::cann
