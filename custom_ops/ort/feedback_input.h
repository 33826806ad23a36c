// What an encoder that searches takes: gains, and the matrices of error feedback, which are made
// ready once where they are constant.
#pragma once

#include "core/feedback.h"
#include "ort/tensor.h"
#include "tq/codec_spec.h"

namespace tq::ort {

// The number of gains, 0 where the encoder has none to try.
int expect_gains(const char* op, const Tensor& gains, spec::Codec codec);

// Whether there is a matrix for each head; one number stands for none.
bool expect_feedback(const char* op, const Tensor& feedback, spec::Codec codec, int64_t heads,
                     int size);

class ReadyFeedback {
 public:
  // The inputs are those of the operator.
  ReadyFeedback(const Api& api, const OrtKernelInfo* info, const Kernels& kernels,
                spec::Codec codec, const spec::Input& feedback, const spec::Input& centroids);

  // `storage` keeps what is made for this call. The tensors have been checked.
  const Feedback* get(const Tensor& feedback, const Tensor& centroids,
                      FeedbackMatrices& storage) const;

 private:
  const Kernels& kernels_;
  const spec::Codec codec_;
  FeedbackMatrices constant_;
  std::vector<int64_t> dims_;  // of the constant
};

}  // namespace tq::ort
