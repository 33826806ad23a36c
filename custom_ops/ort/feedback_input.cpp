// What has another shape than it ought to have is refused by the first call.
#include "ort/feedback_input.h"

#include "tq/operators.h"

namespace tq::ort {
namespace {

using Op = spec::Encode;

FeedbackMatrices matrices_of(const Kernels& kernels, spec::Codec codec, const Tensor& feedback,
                             const Tensor& centroids) {
  const bool as_bytes =
      FeedbackMatrices::as_bytes(kernels, centroids.as<float>(), spec::levels(codec));
  return {feedback.as<float>(), feedback.dims[0], static_cast<int>(feedback.dims[1]), as_bytes};
}

// Of type 0 where it is none.
Tensor read_constant(const Api& api, const OrtKernelInfo* info, const spec::Input& input) {
  int is_constant = 0;
  const OrtValue* value = nullptr;
  check(api.kernel_info_constant_input(info, input.slot, &is_constant, &value));
  if (is_constant == 0 || value == nullptr) return {};
  return read_tensor(api, value, input.name);
}

bool is_square(const Tensor& tensor) {
  return tensor.type == kFloat && tensor.dims.size() == 3 && tensor.dims[1] == tensor.dims[2] &&
         tensor.dims[1] >= 1 && tensor.dims[1] <= spec::kMaxHeadSize;
}

}  // namespace

ReadyFeedback::ReadyFeedback(const Api& api, const OrtKernelInfo* info, const Kernels& kernels,
                             spec::Codec codec)
    : kernels_(kernels), codec_(codec) {
  if (!spec::searches(codec.kind)) return;
  const Tensor feedback = read_constant(api, info, Op::kFeedback);
  const Tensor centroids = read_constant(api, info, Op::kCentroids);
  if (!is_square(feedback) || centroids.type != kFloat ||
      centroids.dims != std::vector<int64_t>{spec::levels(codec)}) {
    return;
  }
  constant_ = matrices_of(kernels, codec, feedback, centroids);
  dims_ = feedback.dims;
}

const Feedback* ReadyFeedback::get(const Tensor& feedback, const Tensor& centroids,
                                   FeedbackMatrices& own) const {
  if (!constant_.is_empty() && dims_ == feedback.dims) return constant_.heads();
  own = matrices_of(kernels_, codec_, feedback, centroids);
  return own.heads();
}

}  // namespace tq::ort
