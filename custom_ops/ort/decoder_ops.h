// The decoder's own operators on the CPU; their contracts are in decoder_inputs.h.
#pragma once

#include "ort/decoder_inputs.h"

namespace tq::ort {

// What all of them keep.
class DecoderKernel {
 public:
  const Api& api() const { return api_; }

 protected:
  DecoderKernel(const Api& api, Element element) : api_(api), element_(element) {}

  Api api_;
  Element element_;
};

class RmsNormalizationKernel : public DecoderKernel {
 public:
  static Signature signature(int float_type) {
    return signature_of<spec::RmsNormalization>(float_type);
  }

  RmsNormalizationKernel(const Api& api, const OrtKernelInfo* info, Element element);
  void compute(OrtKernelContext* context);

 private:
  const Kernels& kernels_;
  float epsilon_;
};

class RotaryEmbeddingKernel : public DecoderKernel {
 public:
  static Signature signature(int float_type) {
    return signature_of<spec::RotaryEmbedding>(float_type);
  }

  RotaryEmbeddingKernel(const Api& api, const OrtKernelInfo* info, Element element);
  void compute(OrtKernelContext* context);

 private:
  const Kernels& kernels_;
};

class SwishKernel : public DecoderKernel {
 public:
  static Signature signature(int float_type) { return signature_of<spec::Swish>(float_type); }

  SwishKernel(const Api& api, const OrtKernelInfo* info, Element element);
  void compute(OrtKernelContext* context);

 private:
  const Kernels& kernels_;
};

class TransposeKernel : public DecoderKernel {
 public:
  static Signature signature(int float_type) { return signature_of<spec::Transpose>(float_type); }

  TransposeKernel(const Api& api, const OrtKernelInfo* info, Element element);
  void compute(OrtKernelContext* context);
};

class GatherKernel : public DecoderKernel {
 public:
  static Signature signature(int float_type) { return signature_of<spec::Gather>(float_type); }

  GatherKernel(const Api& api, const OrtKernelInfo* info, Element element);
  void compute(OrtKernelContext* context);
};

}  // namespace tq::ort
