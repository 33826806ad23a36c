#include "ort/encode_op.h"

#include <algorithm>

#include "core/encode.h"
#include "tq/codec_spec.h"

namespace tq::ort {
namespace {

constexpr const char* kOp = spec::kEncodeOp;

}  // namespace

Signature EncodeKernel::signature(int float_type) {
  return {kOp,
          {{float_type, kRequired},
           {kUint8, kRequired},
           {kInt64, kRequired},
           {kFloat, kRequired},
           {kFloat, kRequired},
           {kFloat, kRequired}},
          {{kUint8, kRequired}}};
}

EncodeKernel::EncodeKernel(const Api& api, const OrtKernelInfo* info, Element element)
    : api_(api),
      element_(element),
      kernels_(choose_kernels(kOp)),
      bits_(read_bits(api, info, kOp, "")) {
  const int64_t norm_correction = read_int(api, info, kOp, "norm_correction");
  if (norm_correction != 0 && norm_correction != 1) {
    throw OpError(std::string(kOp) + ": norm_correction is " + std::to_string(norm_correction) +
                  ", expected 0 or 1");
  }
  norm_correction_ = norm_correction == 1;
}

void EncodeKernel::compute(OrtKernelContext* context) {
  const Tensor vectors = read_input(api_, context, 0, "vectors");
  const Tensor past = read_input(api_, context, 1, "past");
  const Tensor past_length = read_input(api_, context, 2, "past_length");
  const Tensor rotation = read_input(api_, context, 3, "rotation");
  const Tensor centroids = read_input(api_, context, 4, "centroids");
  const Tensor boundaries = read_input(api_, context, 5, "boundaries");

  expect_rank(kOp, vectors, 4);
  expect_type(kOp, past, kUint8);
  expect_rank(kOp, past, 4);
  const int64_t batch = vectors.dims[0], heads = vectors.dims[1], tokens = vectors.dims[2];
  const int64_t head_size = vectors.dims[3];
  if (head_size > spec::kMaxHeadSize || !spec::is_head_size(static_cast<int>(head_size))) {
    throw OpError(std::string(kOp) + ": vectors have head size " + std::to_string(head_size) +
                  ", expected a multiple of " + std::to_string(spec::kHeadSizeMultiple) +
                  " up to " + std::to_string(spec::kMaxHeadSize));
  }
  const int size = static_cast<int>(head_size);
  const int64_t width = spec::row_bytes(bits_, size);
  const int64_t slots = past.dims[2];
  if (past.dims[3] != width) {
    throw OpError(std::string(kOp) + ": past has row width " + std::to_string(past.dims[3]) +
                  ", but " + std::to_string(bits_) + "-bit rows of head size " +
                  std::to_string(size) + " have " + std::to_string(width) + " bytes");
  }
  expect_dims(kOp, past, {batch, heads, slots, width}, "the batch and heads of vectors");
  expect_type(kOp, rotation, kFloat);
  expect_dims(kOp, rotation, {size, size}, "this head size");
  expect_type(kOp, centroids, kFloat);
  expect_dims(kOp, centroids, {1 << bits_}, "these bits");
  expect_type(kOp, boundaries, kFloat);
  expect_dims(kOp, boundaries, {(1 << bits_) - 1}, "these bits");
  const int64_t longest = check_lengths(kOp, past_length, batch, slots, "past");

  // longest <= slots and both tensors exist, so the sum is far from overflow.
  const std::vector<int64_t> shape{batch, heads,
                                   batch == 0 ? slots : std::max(slots, longest + tokens), width};
  expect_fitting(kOp, "present", shape, 1);
  OrtValue* value = nullptr;
  check(api_.context_output(context, 0, shape.data(), shape.size(), &value));
  void* present = nullptr;
  check(api_.get_tensor_mutable_data(value, &present));

  EncodeCall call{};
  call.element = element_;
  call.vectors = vectors.data;
  call.past = past.as<uint8_t>();
  call.present = static_cast<uint8_t*>(present);
  call.past_length = past_length.as<int64_t>();
  call.length_per_batch = past_length.dims[0] != 1;
  call.batch = batch;
  call.heads = heads;
  call.tokens = tokens;
  call.past_slots = slots;
  call.present_slots = shape[2];
  call.head_size = size;
  call.bits = bits_;
  call.norm_correction = norm_correction_;
  call.rotation = rotation.as<float>();
  call.centroids = centroids.as<float>();
  call.boundaries = boundaries.as<float>();
  Pool pool(api_, context);
  encode(kernels_, call, pool.parallel());
  pool.finish();
}

}  // namespace tq::ort
