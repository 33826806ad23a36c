// What has another shape than it ought to have is refused by the first call.
#include "ort/feedback_input.h"

#include "tq/operators.h"

namespace tq::ort {
namespace {

FeedbackMatrices matrices_of(const Kernels& kernels, spec::Codec codec, const Tensor& feedback,
                             const Tensor& centroids) {
  const bool as_bytes = FeedbackMatrices::as_bytes(kernels, codec, centroids.as<float>());
  const int head_size = static_cast<int>(feedback.dims[1]);
  return {feedback.as<float>(), feedback.dims[0], head_size, as_bytes};
}

bool is_square(const Tensor& tensor) {
  return tensor.type == kFloat && tensor.dims.size() == 3 && tensor.dims[1] == tensor.dims[2] &&
         tensor.dims[1] >= 1 && tensor.dims[1] <= spec::kMaxHeadSize;
}

}  // namespace

int expect_gains(const char* op, const Tensor& gains, spec::Codec codec) {
  if (gains.type == 0) return 0;
  expect_type(op, gains, kFloat);
  if (!spec::searches(codec.kind)) return 0;
  expect_rank(op, gains, 1);
  const int64_t count = gains.dims[0];
  if (count < 1 || count > spec::kMaxGains) {
    throw OpError(std::string(op) + ": gains has shape " + text(gains.dims) + ", expected 1 to " +
                  std::to_string(spec::kMaxGains) + " numbers");
  }
  return static_cast<int>(count);
}

bool expect_feedback(const char* op, const Tensor& feedback, spec::Codec codec, int64_t heads,
                     int size) {
  if (feedback.type == 0) return false;
  expect_type(op, feedback, kFloat);
  if (!spec::searches(codec.kind) || feedback.dims == std::vector<int64_t>{1}) return false;
  expect_dims(op, feedback, {heads, size, size}, "the heads and the head size of vectors");
  return true;
}

ReadyFeedback::ReadyFeedback(const Api& api, const OrtKernelInfo* info, const Kernels& kernels,
                             spec::Codec codec, const spec::Input& feedback_input,
                             const spec::Input& centroids_input)
    : kernels_(kernels), codec_(codec) {
  if (!spec::searches(codec.kind)) return;
  const Tensor feedback = read_constant(api, info, feedback_input);
  const Tensor centroids = read_constant(api, info, centroids_input);
  if (!is_square(feedback) || centroids.type != kFloat ||
      centroids.dims != std::vector<int64_t>{spec::levels(codec)}) {
    return;
  }
  constant_ = matrices_of(kernels, codec, feedback, centroids);
  dims_ = feedback.dims;
}

const Feedback* ReadyFeedback::get(const Tensor& feedback, const Tensor& centroids,
                                   FeedbackMatrices& storage) const {
  if (!constant_.is_empty() && dims_ == feedback.dims) return constant_.heads();
  storage = matrices_of(kernels_, codec_, feedback, centroids);
  return storage.heads();
}

}  // namespace tq::ort
