// Checks everything that the core takes for granted (core/encode.h), then calls it.
#include "ort/encode_op.h"

#include <algorithm>
#include <cstdint>

#include "core/encode.h"
#include "tq/codec_spec.h"
#include "tq/operators.h"

namespace tq::ort {
namespace {

using Op = spec::Encode;

constexpr const char* kOp = Op::kName;

// Runtimes that hold past and present in one buffer give it a row for each token, and none for a
// window. ONNX Runtime's message has both shapes, not why they differ.
Tensor make_present(const Api& api, OrtKernelContext* context, const std::vector<int64_t>& shape,
                    const Window& window, int64_t tokens, int64_t slots) {
  try {
    return make_output(api, context, kOp, Op::kPresent, kUint8, shape);
  } catch (const RuntimeStatus& error) {
    const std::string reason = api.error_message(error.status());
    if (shape[2] == slots || reason.find("shape") == std::string::npos) throw;
    api.release_status(error.status());
    const std::string rows = std::to_string(window.overlay_rows);
    const bool is_on = window.overlay_rows > 0;
    throw OpError(std::string(kOp) + ": present needs " + std::to_string(shape[2]) +
                  " cache rows, one for each of " + std::to_string(tokens) + " tokens" +
                  (is_on ? " and " + rows + " for the exact window" : "") +
                  ", but shares a buffer of " + std::to_string(slots) +
                  " rows with past; give it " +
                  (is_on ? rows + " rows more than tokens" : "a row for each token") +
                  " (max_length of onnxruntime-genai counts rows)");
  }
}

}  // namespace

Signature EncodeKernel::signature(int float_type) {
  return signature_of<Op>(float_type);
}

int read_norm_correction(const Api& api, const OrtKernelInfo* info, const char* op) {
  const int64_t norm_correction = read_int(api, info, op, "norm_correction");
  if (norm_correction < 0 || norm_correction > 2) {
    throw OpError(std::string(op) + ": norm_correction is " + std::to_string(norm_correction) +
                  ", expected 0, 1 or 2");
  }
  return static_cast<int>(norm_correction);
}

EncodeTensors read_encode(const Api& api, OrtKernelContext* context, spec::Codec codec,
                          const Window& window, int float_type) {
  EncodeTensors call{};
  call.vectors = read_input(api, context, kOp, Op::kVectors);
  call.past = read_input(api, context, kOp, Op::kPast);
  call.past_length = read_input(api, context, kOp, Op::kPastLength);
  call.rotation = read_input(api, context, kOp, Op::kRotation);
  call.centroids = read_input(api, context, kOp, Op::kCentroids);
  call.boundaries = read_input(api, context, kOp, Op::kBoundaries);
  call.offset = read_optional(api, context, Op::kOffset);

  expect_type(kOp, call.vectors, float_type);
  expect_rank(kOp, call.vectors, 4);
  expect_type(kOp, call.past, kUint8);
  expect_rank(kOp, call.past, 4);
  const std::vector<int64_t>& dims = call.vectors.dims;
  const int64_t batch = dims[0], heads = dims[1], tokens = dims[2];
  const int size = expect_head_size(kOp, call.vectors);
  const int width = expect_rows(kOp, call.past, codec, size);
  const int64_t slots = call.past.dims[2];
  expect_dims(kOp, call.past, {batch, heads, slots, width}, "the batch and heads of vectors");
  expect_tables(kOp, call.rotation, call.centroids, codec, heads, size);
  expect_type(kOp, call.boundaries, kFloat);
  if (spec::is_rotated(codec.kind)) {
    expect_dims(kOp, call.boundaries, {spec::boundaries(codec)}, rows_of(codec, size).c_str());
  }
  call.offsets = call.offset.type == 0 ? 0 : expect_offset(kOp, call.offset, heads, size);
  call.gains = read_optional(api, context, Op::kGains);
  call.feedback = read_optional(api, context, Op::kFeedback);
  call.gain_count = expect_gains(kOp, call.gains, codec);
  call.has_feedback = expect_feedback(kOp, call.feedback, codec, heads, size);
  expect_overlay(kOp, window, call.past.name, size, width);
  const int64_t room = std::max<int64_t>(0, slots - window.overlay_rows);
  const int64_t longest = check_lengths(kOp, call.past_length, batch, room, "past");

  // Without elements the dimensions may be as large as they like.
  expect_tokens(kOp, window, longest, tokens);
  const int64_t total =
      batch == 0 ? slots : std::max(slots, window.overlay_rows + longest + tokens);
  const std::vector<int64_t> shape{batch, heads, total, width};
  expect_fitting(kOp, "present", shape, 1);
  call.present = make_present(api, context, shape, window, longest + tokens, slots);
  expect_apart(kOp, call.past, call.present);

  call.batch = batch;
  call.heads = heads;
  call.tokens = tokens;
  call.slots = slots;
  call.total = total;
  call.head_size = size;
  call.width = width;
  return call;
}

EncodeKernel::EncodeKernel(const Api& api, const OrtKernelInfo* info, Element element)
    : api_(api),
      element_(element),
      float_type_(type_of(element)),
      kernels_(choose_kernels(kOp)),
      codec_(read_codec(api, info, kOp, "", float_type_)),
      rotation_(api, info, Op::kRotation, codec_, spec::has_sketch(codec_.kind)),
      feedback_(api, info, kernels_, codec_, Op::kFeedback, Op::kCentroids),
      norm_correction_(read_norm_correction(api, info, kOp)),
      window_(read_window(api, info, kOp, codec_.kind == spec::Kind::kRaw)) {}

void EncodeKernel::compute(OrtKernelContext* context) {
  const EncodeTensors given = read_encode(api_, context, codec_, window_, float_type_);
  EncodeCall call{};
  call.element = element_;
  call.vectors = given.vectors.data;
  call.past = given.past.as<uint8_t>();
  call.present = static_cast<uint8_t*>(given.present.data);
  call.past_length = given.past_length.as<int64_t>();
  call.length_per_batch = given.past_length.dims[0] != 1;
  call.batch = given.batch;
  call.heads = given.heads;
  call.tokens = given.tokens;
  call.past_slots = given.slots;
  call.present_slots = given.total;
  call.head_size = given.head_size;
  call.width = given.width;
  call.codec = codec_;
  call.window = window_;
  call.norm_correction = norm_correction_;
  std::vector<float> own;
  call.rotation = rotation_.get(given.rotation, own);
  call.centroids = given.centroids.as<float>();
  call.boundaries = given.boundaries.as<float>();
  call.offset = given.offset.as<float>();
  call.offsets = given.offsets;
  call.gains = given.gains.as<float>();
  call.gain_count = given.gain_count;
  FeedbackMatrices own_feedback;
  if (given.has_feedback) {
    call.feedback = feedback_.get(given.feedback, given.centroids, own_feedback);
  }
  Pool pool(api_, context);
  encode(kernels_, call, pool.parallel());
  pool.finish();
}

}  // namespace tq::ort
