// Checks everything that the core takes for granted (core/encode.h), then calls it.
#include "ort/paged_encode_op.h"

#include "core/encode.h"
#include "ort/encode_op.h"
#include "ort/paging_inputs.h"
#include "tq/codec_spec.h"
#include "tq/operators.h"

namespace tq::ort {
namespace {

using Op = spec::PagedEncode;

constexpr const char* kOp = Op::kName;

// Where the rows of all packed tokens go.
struct Places {
  std::vector<int64_t> rows, slots;

  Places(const PackedRequests& packed, int64_t tokens, int64_t heads, int64_t page_slots)
      : rows(static_cast<size_t>(tokens)), slots(static_cast<size_t>(tokens)) {
    for (int64_t r = 0; r < packed.requests; ++r) {
      for (int64_t t = packed.start_of(r); t < packed.end_of(r); ++t) {
        const int64_t slot = packed.past_of(r) + t - packed.start_of(r);
        const int64_t page = packed.page_of(r, slot / page_slots);
        rows[static_cast<size_t>(t)] = page * heads * page_slots + slot % page_slots;
        slots[static_cast<size_t>(t)] = slot;
      }
    }
  }
};

}  // namespace

Signature PagedEncodeKernel::signature(int float_type) { return signature_of<Op>(float_type); }

PagedEncodeKernel::PagedEncodeKernel(const Api& api, const OrtKernelInfo* info, Element element)
    : api_(api),
      element_(element),
      float_type_(type_of(element)),
      kernels_(choose_kernels(kOp)),
      codec_(read_codec(api, info, kOp, "", float_type_)),
      rotation_(api, info, Op::kRotation, codec_, spec::has_sketch(codec_.kind)),
      feedback_(api, info, kernels_, codec_, Op::kFeedback, Op::kCentroids),
      norm_correction_(read_norm_correction(api, info, kOp)) {}

void PagedEncodeKernel::compute(OrtKernelContext* context) {
  const auto input = [&](const spec::Input& one) { return read_input(api_, context, kOp, one); };
  const auto optional = [&](const spec::Input& one) { return read_optional(api_, context, one); };
  const Tensor vectors = input(Op::kVectors), past = input(Op::kPast);
  const Tensor rotation = input(Op::kRotation), centroids = input(Op::kCentroids);
  const Tensor boundaries = input(Op::kBoundaries), offset = optional(Op::kOffset);
  const Tensor gains = optional(Op::kGains), feedback = optional(Op::kFeedback);

  expect_type(kOp, vectors, float_type_);
  expect_rank(kOp, vectors, 4);
  expect_type(kOp, past, kUint8);
  expect_rank(kOp, past, 4);
  const int64_t heads = vectors.dims[1], tokens = vectors.dims[2];
  const int size = expect_head_size(kOp, vectors);
  expect_dims(kOp, vectors, {1, heads, tokens, size}, "packed requests");
  const int width = expect_rows(kOp, past, codec_, size);
  const int64_t pages = past.dims[0], page_slots = past.dims[1];
  expect_dims(kOp, past, {pages, page_slots, heads, width}, "the heads of vectors");
  const int64_t bytes = expect_fitting(kOp, past.name, past.dims, 1);
  expect_tables(kOp, rotation, centroids, codec_, heads, size);
  expect_type(kOp, boundaries, kFloat);
  if (spec::is_rotated(codec_.kind)) {
    expect_dims(kOp, boundaries, {spec::boundaries(codec_)}, rows_of(codec_, size).c_str());
  }
  EncodeCall call{};
  call.offsets = offset.type == 0 ? 0 : expect_offset(kOp, offset, heads, size);
  call.gain_count = expect_gains(kOp, gains, codec_);
  const bool has_feedback = expect_feedback(kOp, feedback, codec_, heads, size);
  const PackedRequests packed =
      read_packed(api_, context, kOp, Op::kCumulativeSequenceLength, Op::kPastSeqlens,
                  Op::kBlockTable, tokens, pages, page_slots);
  expect_own_pages(kOp, packed, pages, page_slots);
  const Tensor present = make_output(api_, context, kOp, Op::kPresent, kUint8, past.dims);
  expect_apart(kOp, past, present);

  const Places found(packed, tokens, heads, page_slots);
  const TokenPlaces places{found.rows.data(), found.slots.data(), page_slots};
  std::vector<float> own;
  FeedbackMatrices own_feedback;
  call.element = element_;
  call.vectors = vectors.data;
  call.past = past.as<uint8_t>();
  call.present = static_cast<uint8_t*>(present.data);
  call.batch = 1;
  call.heads = heads;
  call.tokens = tokens;
  call.past_slots = call.present_slots = bytes / width;
  call.head_size = size;
  call.width = width;
  call.codec = codec_;
  call.norm_correction = norm_correction_;
  call.rotation = rotation_.get(rotation, own);
  call.centroids = centroids.as<float>();
  call.boundaries = boundaries.as<float>();
  call.offset = offset.as<float>();
  call.gains = gains.as<float>();
  if (has_feedback) call.feedback = feedback_.get(feedback, centroids, own_feedback);
  call.places = &places;
  Pool pool(api_, context);
  encode(kernels_, call, pool.parallel());
  pool.finish();
}

}  // namespace tq::ort
