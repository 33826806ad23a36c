// Checks everything that the core takes for granted (core/encode.h), then calls it.
#include "ort/encode_op.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/encode.h"
#include "tq/codec_spec.h"

namespace tq::ort {
namespace {

constexpr const char* kOp = spec::kEncodeOp;
constexpr size_t kRotation = 3;

// One buffer for both, of one shape, is the in-place form; anything else in common would be
// overwritten while it is read.
void check_buffers(const Tensor& past, const Tensor& present, int64_t past_bytes,
                   int64_t present_bytes) {
  if (past_bytes == 0 || present_bytes == 0) return;
  const uintptr_t from = reinterpret_cast<uintptr_t>(past.data);
  const uintptr_t to = reinterpret_cast<uintptr_t>(present.data);
  if (from == to && past.dims == present.dims) return;
  const bool apart = from < to ? to - from >= static_cast<uintptr_t>(past_bytes)
                               : from - to >= static_cast<uintptr_t>(present_bytes);
  if (!apart) {
    throw OpError(std::string(kOp) + ": present of shape " + text(present.dims) +
                  " overlaps past of shape " + text(past.dims) +
                  ", expected one buffer of one shape or two separate ones");
  }
}

}  // namespace

Signature EncodeKernel::signature(int float_type) {
  return {kOp,
          {{float_type, kRequired},
           {kUint8, kRequired},
           {kInt64, kRequired},
           {kFloat, kRequired},
           {kFloat, kRequired},
           {kFloat, kRequired},
           {kFloat, kOptional}},
          {{kUint8, kRequired}}};
}

EncodeKernel::EncodeKernel(const Api& api, const OrtKernelInfo* info, Element element)
    : api_(api),
      element_(element),
      float_type_(type_of(element)),
      kernels_(choose_kernels(kOp)),
      codec_(read_codec(api, info, kOp, "", float_type_)),
      rotation_(api, info, kRotation, codec_, codec_.kind == spec::Kind::kProd) {
  const int64_t norm_correction = read_int(api, info, kOp, "norm_correction");
  if (norm_correction != 0 && norm_correction != 1) {
    throw OpError(std::string(kOp) + ": norm_correction is " + std::to_string(norm_correction) +
                  ", expected 0 or 1");
  }
  norm_correction_ = norm_correction == 1;
}

void EncodeKernel::compute(OrtKernelContext* context) {
  const Tensor vectors = read_input(api_, context, 0, kOp, "vectors");
  const Tensor past = read_input(api_, context, 1, kOp, "past");
  const Tensor past_length = read_input(api_, context, 2, kOp, "past_length");
  const Tensor rotation = read_input(api_, context, kRotation, kOp, "rotation");
  const Tensor centroids = read_input(api_, context, 4, kOp, "centroids");
  const Tensor boundaries = read_input(api_, context, 5, kOp, "boundaries");
  const Tensor offset = read_optional(api_, context, 6, "offset");

  expect_type(kOp, vectors, float_type_);
  expect_rank(kOp, vectors, 4);
  expect_type(kOp, past, kUint8);
  expect_rank(kOp, past, 4);
  const int64_t batch = vectors.dims[0], heads = vectors.dims[1], tokens = vectors.dims[2];
  const int size = expect_head_size(kOp, vectors);
  const int width = expect_rows(kOp, past, codec_, size);
  const int64_t slots = past.dims[2];
  expect_dims(kOp, past, {batch, heads, slots, width}, "the batch and heads of vectors");
  expect_tables(kOp, rotation, centroids, codec_, size);
  expect_type(kOp, boundaries, kFloat);
  if (spec::is_rotated(codec_.kind)) {
    expect_dims(kOp, boundaries, {spec::levels(codec_) - 1}, rows_of(codec_, size).c_str());
  }
  const int64_t offsets = offset.type == 0 ? 0 : expect_offset(kOp, offset, heads, size);
  const int64_t longest = check_lengths(kOp, past_length, batch, slots, "past");

  // Without elements the dimensions may be as large as they like.
  if (tokens > std::numeric_limits<int64_t>::max() - longest) {
    throw OpError(std::string(kOp) + ": past_length " + std::to_string(longest) + " plus " +
                  std::to_string(tokens) + " new tokens is more than can be addressed");
  }
  const int64_t total = batch == 0 ? slots : std::max(slots, longest + tokens);
  const std::vector<int64_t> shape{batch, heads, total, width};
  const int64_t bytes = expect_fitting(kOp, "present", shape, 1);
  const Tensor present = make_output(api_, context, kOp, "present", kUint8, shape);
  check_buffers(past, present, expect_fitting(kOp, "past", past.dims, 1), bytes);

  EncodeCall call{};
  call.element = element_;
  call.vectors = vectors.data;
  call.past = past.as<uint8_t>();
  call.present = static_cast<uint8_t*>(present.data);
  call.past_length = past_length.as<int64_t>();
  call.length_per_batch = past_length.dims[0] != 1;
  call.batch = batch;
  call.heads = heads;
  call.tokens = tokens;
  call.past_slots = slots;
  call.present_slots = total;
  call.head_size = size;
  call.width = width;
  call.codec = codec_;
  call.norm_correction = norm_correction_;
  std::vector<float> own;
  call.rotation = rotation_.get(rotation, own);
  call.centroids = centroids.as<float>();
  call.boundaries = boundaries.as<float>();
  call.offset = offset.as<float>();
  call.offsets = offsets;
  Pool pool(api_, context);
  encode(kernels_, call, pool.parallel());
  pool.finish();
}

}  // namespace tq::ort
