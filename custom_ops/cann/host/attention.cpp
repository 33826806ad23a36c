// TurboQuantDequantAttention on a device.
#include <optional>

#include "cann/host/attention_cut.h"
#include "cann/host/device_features.h"
#include "cann/host/launch.h"
#include "cann/host/limits.h"
#include "cann/host/operators.h"
#include "cann/host/scratch.h"

namespace tq::cann {

ort::Signature AttentionKernel::signature(int float_type) {
  return on_device(ort::AttentionKernel::signature(float_type), {Op::kPastLength, Op::kLeftPadding});
}

AttentionKernel::AttentionKernel(const ort::Api& api, const OrtKernelInfo* info, Element element)
    : DeviceKernel(api, element),
      attributes_(ort::read_attention_attributes(api, info, float_type_)) {
  expect_element(kOp, float_type_);
  library_ = &kernel_library(kOp);
  vendor_ = VendorAttention::of(api, info, attributes_, *library_);
  if (vendor_ == nullptr) {
    expect_codec(kOp, "key_codec", attributes_.key, attributes_.window);
    expect_codec(kOp, "value_codec", attributes_.value, attributes_.window);
    expect_kernels(kOp, *library_, attributes_.window.has_planes && attributes_.window.is_on());
  }
  if (!attributes_.causal) refuse(kOp, "causal is 0", features::kMasks);
  expect_softcap(kOp, attributes_.softcap);
  expect_overlay(kOp, attributes_.window);
  expect_known_inputs<Op>(api, info);
}

void AttentionKernel::compute(OrtKernelContext* context) {
  const ort::AttentionTensors call =
      ort::read_attention(api_, context, attributes_, float_type_);
  expect_kernel_head_size(kOp, call.query);
  expect_exact_rows(kOp, call.key_cache, attributes_.key, call.head_size, library_->soc);
  expect_exact_rows(kOp, call.value_cache, attributes_.value, call.head_size, library_->soc);
  expect_counted(kOp, call.query, call.slots);
  if (call.batch == 0 || call.query_heads == 0 || call.tokens == 0) return;

  void* const stream = stream_of(api_, context, kOp);
  std::optional<VendorCall> vendor;  // its memory has the middle until the launch is enqueued
  Middle middle;
  if (vendor_ != nullptr) {
    vendor.emplace(vendor_->aclnn(), api_, context, kOp, Op::kQuery, stream);
    if (vendor_->attend(*vendor, call, element_, stream, middle)) return;
  }
  for_each_part(call.past_length, call.left_padding, call.batch, [&](Part part) {
    // What is beside a middle is too short for a cut.
    const int64_t keys = middle.averages != nullptr
                             ? 0
                             : keys_of_task(part.past_length + call.tokens, call.tokens,
                                            attributes_.sliding_window, part.left_padding);
    const AttentionCut cut = cut_attention(call.heads, call.query_heads / call.heads,
                                           call.tokens, keys, part.count);
    const int64_t bytes = cut.scratch_bytes(cut.sequences, call.head_size);
    const Scratch scratch(api_, context, kOp, Op::kQuery, static_cast<size_t>(bytes));
    const int64_t end = part.first + part.count;
    for (; part.first < end; part.first += part.count) {
      part.count = std::min(end - part.first, cut.sequences);
      launch(call, part, cut, middle, scratch.data(), stream);
    }
  });
}

void AttentionKernel::launch(const ort::AttentionTensors& call, const Part& part,
                             const AttentionCut& cut, const Middle& middle, void* scratch,
                             void* stream) const {
  const int64_t bytes = static_cast<int64_t>(element_size(element_));
  const Window& window = attributes_.window;
  TqAttentionTiling tiling{};
  tiling.query = sequence(call.query, part.first, bytes);
  tiling.keys = sequence(call.key_cache, part.first, 1);
  tiling.values = sequence(call.value_cache, part.first, 1);
  tiling.key_rotation = address(call.key_rotation.data);
  tiling.key_centroids = address(call.key_centroids.data);
  tiling.value_rotation = address(call.value_rotation.data);
  tiling.value_centroids = address(call.value_centroids.data);
  tiling.key_offset = address(call.key_offset.data);
  tiling.value_offset = address(call.value_offset.data);
  tiling.head_sink = address(call.sink.data);
  if (window.is_on()) {
    tiling.new_keys = sequence(call.new_keys, part.first, bytes);
    tiling.new_values = sequence(call.new_values, part.first, bytes);
  }
  const Slots codes =
      slots_of_codes(attributes_, part.past_length, part.left_padding, call.tokens);
  if (middle.averages != nullptr && codes.first < codes.end) {
    const int64_t row = part.first * call.query_heads;
    tiling.middle = address(middle.averages + row * call.head_size * 2);
    tiling.middle_logs = address(middle.logs + row * 4);
    tiling.middle_first = narrow(codes.first);
    tiling.middle_end = narrow(codes.end);
  }
  tiling.output = sequence(call.output, part.first, bytes);
  tiling.scratch = address(scratch);
  tiling.past_length = part.past_length;
  tiling.batch = narrow(part.count);
  tiling.query_heads = narrow(call.query_heads);
  tiling.heads = narrow(call.heads);
  tiling.new_tokens = narrow(call.tokens);
  tiling.capacity = narrow(call.slots);
  tiling.parts = narrow(cut.parts);
  tiling.part_tokens = narrow(cut.part_tokens);
  tiling.offset_rows = narrow(call.key_offsets);
  // A window wider than the cache hides nothing.
  tiling.sliding_window = narrow(std::min(attributes_.sliding_window, kMostCounted));
  tiling.first_slot = part.left_padding;
  tiling.key_bits = kernel_bits(attributes_.key, window);
  tiling.value_bits = kernel_bits(attributes_.value, window);
  tiling.recent = narrow(window.recent);
  tiling.sinks = narrow(window.sinks);
  tiling.overlay_rows = narrow(window.overlay_rows);
  tiling.head_size = narrow(call.head_size);
  tiling.scale = attributes_.scale;
  tiling.softcap = attributes_.softcap;

  const int64_t tasks = part.count * cut.tasks;
  const auto attend = of_element(library_->tq_attention_float32, library_->tq_attention_float16);
  expect_enqueued(kOp, "its kernel",
                  attend(cores_for(tasks * cut.parts, library_->cores), stream, &tiling));
  if (cut.parts == 1) return;
  const auto merge =
      of_element(library_->tq_attention_merge_float32, library_->tq_attention_merge_float16);
  expect_enqueued(kOp, "the kernel that merges its parts",
                  merge(cores_for(tasks, library_->cores), stream, &tiling));
}

}  // namespace tq::cann
