// The operators on caches, on the stream of CANNExecutionProvider. The contracts are those of
// ort/encode_op.h and ort/attention_op.h, less what limits.h refuses; tensors are on the device but
// for past_length, which the host reads and checks before anything is enqueued.
#pragma once

#include "cann/host/kernel_library.h"
#include "ort/attention_op.h"
#include "ort/custom_op.h"
#include "ort/encode_op.h"

namespace tq::cann {

class EncodeKernel {
 public:
  static ort::Signature signature(int float_type);

  EncodeKernel(const ort::Api& api, const OrtKernelInfo* info, Element element);
  void compute(OrtKernelContext* context);
  const ort::Api& api() const { return api_; }
  const KernelLibrary& library() const { return *library_; }

 private:
  // What the kernel does not write: the past and, where present has more slots, zeros.
  void keep(const ort::EncodeTensors& call, void* stream) const;

  ort::Api api_;
  Element element_;
  int float_type_;
  spec::Codec codec_;
  const KernelLibrary* library_ = nullptr;
};

class AttentionKernel {
 public:
  static ort::Signature signature(int float_type);

  AttentionKernel(const ort::Api& api, const OrtKernelInfo* info, Element element);
  void compute(OrtKernelContext* context);
  const ort::Api& api() const { return api_; }
  const KernelLibrary& library() const { return *library_; }

 private:
  ort::Api api_;
  Element element_;
  int float_type_;
  ort::AttentionAttributes attributes_;
  const KernelLibrary* library_ = nullptr;
};

}  // namespace tq::cann
