// Shapes are compared before any data is read; the contract is in encode_inputs.h.
#include "ort/encode_inputs.h"

#include <algorithm>
#include <string>

#include "ort/codec_inputs.h"
#include "ort/feedback_input.h"
#include "ort/rotary_input.h"
#include "ort/window_inputs.h"
#include "tq/operators.h"

namespace tq::ort {
namespace {

// The inputs that both operators have; types and ranks of vectors and past.
template <class Op>
EncodeTensors read_shared(const Api& api, OrtKernelContext* context, int float_type) {
  const auto required = [&](const spec::Input& input) {
    return read_input(api, context, Op::kName, input);
  };
  EncodeTensors call{};
  call.vectors = required(Op::kVectors);
  call.past = required(Op::kPast);
  call.rotation = required(Op::kRotation);
  call.centroids = required(Op::kCentroids);
  call.boundaries = required(Op::kBoundaries);
  call.offset = read_optional(api, context, Op::kOffset);
  call.gains = read_optional(api, context, Op::kGains);
  call.feedback = read_optional(api, context, Op::kFeedback);
  call.frequencies = read_optional(api, context, Op::kFrequencies);
  expect_type(Op::kName, call.vectors, float_type);
  expect_rank(Op::kName, call.vectors, 4);
  expect_type(Op::kName, call.past, kUint8);
  expect_rank(Op::kName, call.past, 4);
  call.batch = call.vectors.dims[0];
  call.heads = call.vectors.dims[1];
  call.tokens = call.vectors.dims[2];
  call.head_size = expect_head_size(Op::kName, call.vectors);
  return call;
}

// What belongs to the codec, where past has the right shape.
void check_codec(const char* op, EncodeTensors& call, spec::Codec codec) {
  expect_tables(op, call.rotation, call.centroids, codec, call.head_size);
  expect_type(op, call.boundaries, kFloat);
  if (spec::is_rotated(codec.kind)) {
    expect_dims(op, call.boundaries, {spec::boundaries(codec)},
                rows_of(codec, call.head_size).c_str());
  }
  call.has_rotary_offset =
      expect_frequencies(op, call.frequencies, call.offset, call.heads, call.head_size);
  call.offsets =
      call.offset.type == 0 ? 0 : expect_offset(op, call.offset, call.heads, call.head_size);
  call.gain_count = expect_gains(op, call.gains, codec);
  call.has_feedback = expect_feedback(op, call.feedback, codec, call.heads, call.head_size);
}

// Runtimes that hold past and present in one buffer give it a row for each token, and none for an
// overlay. ONNX Runtime's message has both shapes, not why they differ.
Tensor make_present(const Api& api, OrtKernelContext* context, const std::vector<int64_t>& shape,
                    const Window& window, int64_t tokens, int64_t slots) {
  using Op = spec::Encode;
  try {
    return make_output(api, context, Op::kName, Op::kPresent, kUint8, shape);
  } catch (const RuntimeStatus& error) {
    const std::string reason = api.error_message(error.status());
    if (shape[2] == slots || reason.find("shape") == std::string::npos) throw;
    api.release_status(error.status());
    const std::string rows = std::to_string(window.overlay_rows);
    const bool is_on = window.overlay_rows > 0;
    throw OpError(std::string(Op::kName) + ": present needs " + std::to_string(shape[2]) +
                  " cache rows, one for each of " + std::to_string(tokens) + " tokens" +
                  (is_on ? " and " + rows + " for the exact window" : "") +
                  ", but shares a buffer of " + std::to_string(slots) +
                  " rows with past; give it " +
                  (is_on ? rows + " rows more than tokens" : "a row for each token"));
  }
}

}  // namespace

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
  using Op = spec::Encode;
  constexpr const char* kOp = Op::kName;
  EncodeTensors call = read_shared<Op>(api, context, float_type);
  call.past_length = read_input(api, context, kOp, Op::kPastLength);
  call.width = expect_rows(kOp, call.past, codec, call.head_size);
  call.slots = call.past.dims[2];
  expect_dims(kOp, call.past, {call.batch, call.heads, call.slots, call.width},
              "the batch and heads of vectors");
  check_codec(kOp, call, codec);
  expect_planes(kOp, window, call.past.name, codec, call.head_size, call.width);
  expect_overlay(kOp, window, call.past.name, call.head_size, call.width);
  const int64_t room = std::max<int64_t>(0, call.slots - window.overlay_rows);
  const int64_t longest = check_lengths(kOp, call.past_length, call.batch, room, "past");

  // Without elements the dimensions may be as large as they like.
  expect_tokens(kOp, window, longest, call.tokens);
  call.total = call.batch == 0 ? call.slots
                               : std::max(call.slots, window.overlay_rows + longest + call.tokens);
  if (call.has_rotary_offset) {
    call.left_padding = read_optional(api, context, Op::kLeftPadding);
  }
  if (call.left_padding.type != 0) {
    check_lengths(kOp, call.left_padding, call.batch, call.total - window.overlay_rows, "present");
  }
  const std::vector<int64_t> shape{call.batch, call.heads, call.total, call.width};
  expect_fitting(kOp, "present", shape, 1);
  call.present = make_present(api, context, shape, window, longest + call.tokens, call.slots);
  expect_apart(kOp, call.past, call.present);
  return call;
}

EncodeTensors read_paged_encode(const Api& api, OrtKernelContext* context, spec::Codec codec,
                                const PagedWindow& window, int float_type) {
  using Op = spec::PagedEncode;
  constexpr const char* kOp = Op::kName;
  EncodeTensors call = read_shared<Op>(api, context, float_type);
  expect_dims(kOp, call.vectors, {1, call.heads, call.tokens, call.head_size}, "packed requests");
  call.width = expect_rows(kOp, call.past, codec, call.head_size);
  const int64_t pages = call.past.dims[0];
  call.page_slots = call.past.dims[1];
  expect_dims(kOp, call.past, {pages, call.page_slots, call.heads, call.width},
              "the heads of vectors");
  expect_fitting(kOp, call.past.name, call.past.dims, 1);
  call.page_bytes = call.page_slots * call.width;
  call.width = static_cast<int>(
      expect_page(kOp, window, call.past, spec::row_bytes(codec, call.head_size), call.head_size));
  check_codec(kOp, call, codec);
  call.packed = read_packed(api, context, kOp, Op::kCumulativeSequenceLength, Op::kPastSeqlens,
                            Op::kBlockTable, call.tokens, pages, call.page_slots);
  expect_own_pages(kOp, call.packed, pages, call.page_slots);
  call.present = make_output(api, context, kOp, Op::kPresent, kUint8, call.past.dims);
  expect_apart(kOp, call.past, call.present);
  return call;
}

}  // namespace tq::ort
