// The operators on caches, on the stream of CANNExecutionProvider. Same contract as
// ort/encode_op.h and ort/attention_op.h, less what limits.h refuses; tensors are on the device but
// for past_length, which the host reads and checks before anything is enqueued.
#pragma once

#include "cann/host/kernel_library.h"
#include "cann/host/vendor.h"
#include "ort/attention_op.h"
#include "ort/custom_op.h"
#include "ort/encode_op.h"

namespace tq::cann {

struct AttentionCut;
struct Part;

// The common state of all operators on a device.
class DeviceKernel {
 public:
  const ort::Api& api() const { return api_; }
  const KernelLibrary& library() const { return *library_; }

 protected:
  // Each operator looks up the library itself, after its refusals.
  DeviceKernel(const ort::Api& api, Element element)
      : api_(api), element_(element), float_type_(ort::type_of(element)) {}

  template <class Launch>
  Launch* of_element(Launch* float32, Launch* float16) const {
    return element_ == Element::kFloat ? float32 : float16;
  }

  ort::Api api_;
  Element element_;
  int float_type_;
  const KernelLibrary* library_ = nullptr;
};

class EncodeKernel : public DeviceKernel {
  using Op = spec::Encode;
  static constexpr const char* kOp = Op::kName;

 public:
  static ort::Signature signature(int float_type);

  EncodeKernel(const ort::Api& api, const OrtKernelInfo* info, Element element);
  void compute(OrtKernelContext* context);

 private:
  // Writes the bytes that the kernel does not: the past and, where present has more slots, zeros.
  void keep(const ort::EncodeTensors& call, void* stream) const;

  spec::Codec codec_;
  int norm_correction_;
  Window window_;
  std::unique_ptr<VendorEncode> vendor_;  // for planes, without our kernels
};

class AttentionKernel : public DeviceKernel {
  using Op = spec::Attention;
  static constexpr const char* kOp = Op::kName;

 public:
  static ort::Signature signature(int float_type);

  AttentionKernel(const ort::Api& api, const OrtKernelInfo* info, Element element);
  void compute(OrtKernelContext* context);

 private:
  // Sequences of one length, in one launch or, where their keys are cut, in two.
  void launch(const ort::AttentionTensors& call, const Part& part, const AttentionCut& cut,
              const Middle& middle, void* scratch, void* stream) const;

  ort::AttentionAttributes attributes_;
  std::unique_ptr<VendorAttention> vendor_;  // for planes, where it can do all or most of it
};

}  // namespace tq::cann
