// The decoder's own operators on the CPU; their contracts are in decoder_inputs.h.
#pragma once

#include "ort/decoder_inputs.h"

namespace tq::ort {

class RmsNormalizationKernel {
 public:
  static Signature signature(int float_type) { return rms_normalization_signature(float_type); }

  RmsNormalizationKernel(const Api& api, const OrtKernelInfo* info, Element element);
  void compute(OrtKernelContext* context);
  const Api& api() const { return api_; }

 private:
  Api api_;
  Element element_;
  const Kernels& kernels_;
  float epsilon_;
};

class RotaryEmbeddingKernel {
 public:
  static Signature signature(int float_type) { return rotary_embedding_signature(float_type); }

  RotaryEmbeddingKernel(const Api& api, const OrtKernelInfo* info, Element element);
  void compute(OrtKernelContext* context);
  const Api& api() const { return api_; }

 private:
  Api api_;
  Element element_;
  const Kernels& kernels_;
};

class SwishKernel {
 public:
  static Signature signature(int float_type) { return swish_signature(float_type); }

  SwishKernel(const Api& api, const OrtKernelInfo* info, Element element);
  void compute(OrtKernelContext* context);
  const Api& api() const { return api_; }

 private:
  Api api_;
  Element element_;
  const Kernels& kernels_;
};

class TransposeKernel {
 public:
  static Signature signature(int float_type) { return transpose_signature(float_type); }

  TransposeKernel(const Api& api, const OrtKernelInfo* info, Element element);
  void compute(OrtKernelContext* context);
  const Api& api() const { return api_; }

 private:
  Api api_;
  Element element_;
};

class GatherKernel {
 public:
  static Signature signature(int float_type) { return gather_signature(float_type); }

  GatherKernel(const Api& api, const OrtKernelInfo* info, Element element);
  void compute(OrtKernelContext* context);
  const Api& api() const { return api_; }

 private:
  Api api_;
  Element element_;
};

}  // namespace tq::ort
