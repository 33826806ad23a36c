// The matrices of error feedback of a kernel, which are made ready once where they are constant.
#pragma once

#include "core/feedback.h"
#include "ort/tensor.h"
#include "tq/codec_spec.h"

namespace tq::ort {

class ReadyFeedback {
 public:
  ReadyFeedback(const Api& api, const OrtKernelInfo* info, const Kernels& kernels,
                spec::Codec codec);

  // `own` keeps what is made for this call. The tensors have been checked.
  const Feedback* get(const Tensor& feedback, const Tensor& centroids, FeedbackMatrices& own) const;

 private:
  const Kernels& kernels_;
  const spec::Codec codec_;
  FeedbackMatrices constant_;
  std::vector<int64_t> dims_;  // of the constant
};

}  // namespace tq::ort
