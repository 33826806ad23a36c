// TurboQuantEncode on a device.
#include "cann/host/launch.h"
#include "cann/host/limits.h"
#include "cann/host/operators.h"
#include "core/planes.h"

namespace tq::cann {

ort::Signature EncodeKernel::signature(int float_type) {
  return on_device(ort::EncodeKernel::signature(float_type), {Op::kPastLength});
}

EncodeKernel::EncodeKernel(const ort::Api& api, const OrtKernelInfo* info, Element element)
    : DeviceKernel(api, element),
      codec_(ort::read_codec(api, info, kOp, "", float_type_)),
      norm_correction_(ort::read_norm_correction(api, info, kOp)),
      window_(ort::read_window(api, info, kOp, codec_.kind == spec::Kind::kRaw)) {
  expect_element(kOp, float_type_);
  library_ = &kernel_library(kOp);
  // CANN's encoder has larger errors than ours.
  if (!library_->has_kernels()) vendor_ = VendorEncode::of(api, info, codec_, window_, *library_);
  if (vendor_ == nullptr) {
    expect_codec(kOp, "codec", codec_, window_);
    expect_kernels(kOp, *library_, window_.has_planes && window_.is_on());
  }
  expect_overlay(kOp, window_);
  expect_known_inputs<Op>(api, info);
}

void EncodeKernel::keep(const ort::EncodeTensors& call, void* stream) const {
  const auto copy = [&](uint8_t* to, const uint8_t* from, int64_t bytes) {
    if (bytes > 0) enqueue_copy(*library_, kOp, "the copy of past", to, from, bytes, stream);
  };
  const int64_t lanes = call.batch * call.heads;
  uint8_t* to = static_cast<uint8_t*>(call.present.data);
  const uint8_t* from = call.past.as<uint8_t>();
  if (call.slots == call.total) return copy(to, from, lanes * call.total * call.width);
  // Rows of all heads, or by sequence codes, fields and overlays (core/planes.h): bytes of a head.
  struct Piece {
    int64_t past, present;
  };
  std::vector<Piece> pieces = {{call.slots * call.width, call.total * call.width}};
  if (window_.has_planes) {
    const int size = static_cast<int>(call.head_size);
    const Planes past(codec_, size, call.heads, call.slots, window_.overlay_rows);
    const Planes present(codec_, size, call.heads, call.total, window_.overlay_rows);
    pieces = {{past.slots * past.code_bytes, present.slots * present.code_bytes},
              {past.slots * past.field_bytes, present.slots * present.field_bytes},
              {past.overlay_rows * past.width(), present.overlay_rows * present.width()}};
  }
  for (int64_t b = 0; b < call.batch; ++b) {
    for (const Piece& piece : pieces) {
      const size_t rest = static_cast<size_t>(piece.present - piece.past);
      for (int64_t lane = 0; lane < call.heads; ++lane, to += piece.present, from += piece.past) {
        copy(to, from, piece.past);
        if (rest == 0) continue;
        expect_enqueued(kOp, "the zeros beyond past",
                        library_->fill(to + piece.past, rest, 0, rest, stream));
      }
    }
  }
}

void EncodeKernel::compute(OrtKernelContext* context) {
  const ort::EncodeTensors call = ort::read_encode(api_, context, codec_, window_, float_type_);
  expect_kernel_head_size(kOp, call.vectors);
  expect_exact_rows(kOp, call.past, codec_, call.head_size, library_->soc);
  expect_counted(kOp, call.vectors, call.total);
  if (call.batch == 0 || call.heads == 0) return;

  void* const stream = stream_of(api_, context, kOp);
  if (!call.in_place()) keep(call, stream);
  if (call.tokens == 0 && !window_.is_on()) return;
  if (vendor_ != nullptr) return vendor_->encode(api_, context, call, element_, stream);
  const auto launch = of_element(library_->tq_encode_float32, library_->tq_encode_float16);
  const int64_t bytes = static_cast<int64_t>(element_size(element_));
  TqEncodeTiling tiling{};
  tiling.rotation = address(call.rotation.data);
  tiling.centroids = address(call.centroids.data);
  tiling.boundaries = address(call.boundaries.data);
  tiling.offset = address(call.offset.data);
  tiling.gains = address(call.gains.data);
  tiling.heads = narrow(call.heads);
  tiling.new_tokens = narrow(call.tokens);
  tiling.capacity = narrow(call.total);
  tiling.offset_rows = narrow(call.offsets);
  tiling.gain_count = narrow(call.gain_count);
  tiling.bits = kernel_bits(codec_, window_);
  tiling.norm_correction = narrow(norm_correction_);
  tiling.recent = narrow(window_.recent);
  tiling.sinks = narrow(window_.sinks);
  tiling.overlay_rows = narrow(window_.overlay_rows);
  tiling.head_size = narrow(call.head_size);
  for_each_part(call.past_length, {}, call.batch, [&](const Part& part) {
    tiling.vectors = sequence(call.vectors, part.first, bytes);
    tiling.cache = sequence(call.present, part.first, 1);
    tiling.past_length = part.past_length;
    tiling.batch = narrow(part.count);
    const int64_t vectors = part.count * call.heads * std::max<int64_t>(1, call.tokens);
    expect_enqueued(kOp, "its kernel",
                    launch(cores_for(vectors, library_->cores), stream, &tiling));
  });
}

}  // namespace tq::cann
