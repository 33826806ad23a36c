// Inputs are checked (ort/encode_inputs.h), then the core is called.
#include "ort/encode_op.h"

#include "tq/operators.h"

namespace tq::ort {
namespace {

using spec::Encode;
using spec::PagedEncode;

// Where the rows of all packed tokens begin, and their slots.
struct PackedRows {
  std::vector<int64_t> rows, slots;

  explicit PackedRows(const EncodeTensors& tensors)
      : rows(static_cast<size_t>(tensors.tokens)), slots(rows.size()) {
    const PackedRequests& packed = tensors.packed;
    const int64_t page_slots = tensors.page_slots;
    for (int64_t r = 0; r < packed.requests; ++r) {
      for (int64_t t = packed.start_of(r); t < packed.end_of(r); ++t) {
        const int64_t slot = packed.past_of(r) + t - packed.start_of(r);
        const int64_t page = packed.page_of(r, slot / page_slots);
        rows[static_cast<size_t>(t)] =
            page * tensors.heads * tensors.page_bytes + slot % page_slots * tensors.width;
        slots[static_cast<size_t>(t)] = slot;
      }
    }
  }
};

}  // namespace

template <class Op>
EncodeState::EncodeState(const Api& api, const OrtKernelInfo* info, Element element, Op)
    : api_(api),
      element_(element),
      float_type_(type_of(element)),
      kernels_(choose_kernels(Op::kName)),
      codec_(read_codec(api, info, Op::kName, "", float_type_)),
      rotation_(api, info, Op::kRotation, codec_, spec::has_sketch(codec_.kind)),
      feedback_(api, info, kernels_, codec_, Op::kFeedback, Op::kCentroids),
      rotary_offset_(api, info, Op::kFrequencies, Op::kOffset),
      norm_correction_(read_norm_correction(api, info, Op::kName)) {}

EncodeCall EncodeState::call_of(const EncodeTensors& tensors, TableStorage& storage) const {
  EncodeCall call{};
  call.element = element_;
  call.vectors = tensors.vectors.data;
  call.past = tensors.past.as<uint8_t>();
  call.present = static_cast<uint8_t*>(tensors.present.data);
  call.batch = tensors.batch;
  call.heads = tensors.heads;
  call.tokens = tensors.tokens;
  call.past_slots = tensors.slots;
  call.present_slots = tensors.total;
  call.head_size = tensors.head_size;
  call.width = tensors.width;
  call.codec = codec_;
  call.norm_correction = norm_correction_;
  call.rotation = rotation_.get(tensors.rotation, storage.rotation);
  call.centroids = tensors.centroids.as<float>();
  call.boundaries = tensors.boundaries.as<float>();
  if (tensors.has_rotary_offset) {
    call.rotary_offset =
        rotary_offset_.get(tensors.frequencies, tensors.offset, storage.rotary_offset);
    call.left_padding = tensors.left_padding.as<int64_t>();
    call.padding_per_batch = tensors.left_padding.type != 0 && tensors.left_padding.dims[0] != 1;
  } else {
    call.offset = tensors.offset.as<float>();
    call.offsets = tensors.offsets;
  }
  call.gains = tensors.gains.as<float>();
  call.gain_count = tensors.gain_count;
  if (tensors.has_feedback) {
    call.feedback = feedback_.get(tensors.feedback, tensors.centroids, storage.feedback);
  }
  return call;
}

void EncodeState::run(const EncodeCall& call, OrtKernelContext* context) const {
  Pool pool(api_, context);
  encode(kernels_, call, pool.parallel());
  pool.finish();
}

EncodeKernel::EncodeKernel(const Api& api, const OrtKernelInfo* info, Element element)
    : EncodeState(api, info, element, Encode{}),
      window_(read_window(api, info, Encode::kName, codec_.kind == spec::Kind::kRaw)) {}

void EncodeKernel::compute(OrtKernelContext* context) {
  const EncodeTensors tensors = read_encode(api_, context, codec_, window_, float_type_);
  EncodeState::TableStorage storage;
  EncodeCall call = call_of(tensors, storage);
  call.past_length = tensors.past_length.as<int64_t>();
  call.length_per_batch = tensors.past_length.dims[0] != 1;
  call.window = window_;
  run(call, context);
}

PagedEncodeKernel::PagedEncodeKernel(const Api& api, const OrtKernelInfo* info, Element element)
    : EncodeState(api, info, element, PagedEncode{}),
      window_(read_paged_window(api, info, PagedEncode::kName, codec_.kind == spec::Kind::kRaw)) {}

void PagedEncodeKernel::compute(OrtKernelContext* context) {
  const EncodeTensors tensors = read_paged_encode(api_, context, codec_, window_, float_type_);
  EncodeState::TableStorage storage;
  EncodeCall call = call_of(tensors, storage);
  const PackedRows packed(tensors);
  std::optional<PageWindow> window;
  if (window_.entries.is_on()) {
    window.emplace(window_.entries, tensors.head_size, tensors.page_slots, tensors.width,
                   tensors.page_bytes);
  }
  const PackedRequests& requests = tensors.packed;
  const TokenPlaces places{packed.rows.data(),
                           packed.slots.data(),
                           tensors.page_bytes,
                           tensors.past.dims[0] * tensors.heads * tensors.page_bytes,
                           window.has_value() ? &*window : nullptr,
                           requests.requests,
                           requests.cumulative.as<int32_t>(),
                           requests.past.as<int32_t>(),
                           requests.table.as<int32_t>(),
                           requests.columns};
  call.places = &places;
  run(call, context);
}

}  // namespace tq::ort
