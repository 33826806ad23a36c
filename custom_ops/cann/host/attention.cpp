// TurboQuantDequantAttention on a device.
#include "cann/host/attention_cut.h"
#include "cann/host/device_features.h"
#include "cann/host/launch.h"
#include "cann/host/limits.h"
#include "cann/host/operators.h"
#include "cann/host/scratch.h"

namespace tq::cann {
namespace {

using Op = spec::Attention;

constexpr const char* kOp = Op::kName;

}  // namespace

ort::Signature AttentionKernel::signature(int float_type) {
  return on_device(ort::AttentionKernel::signature(float_type), {Op::kPastLength, Op::kLeftPadding});
}

AttentionKernel::AttentionKernel(const ort::Api& api, const OrtKernelInfo* info, Element element)
    : DeviceKernel(api, element),
      attributes_(ort::read_attention_attributes(api, info, float_type_)) {
  expect_element(kOp, float_type_);
  expect_codec(kOp, "key_codec", attributes_.key);
  expect_codec(kOp, "value_codec", attributes_.value);
  if (!attributes_.causal) refuse(kOp, "causal is 0", features::kMasks);
  expect_softcap(kOp, attributes_.softcap);
  expect_known_inputs<Op>(api, info);
  library_ = &kernel_library(kOp);
}

void AttentionKernel::compute(OrtKernelContext* context) {
  const ort::AttentionTensors call =
      ort::read_attention(api_, context, attributes_, float_type_);
  expect_kernel_head_size(kOp, call.query);
  expect_exact_rows(kOp, call.key_cache, attributes_.key, call.head_size, library_->soc);
  expect_exact_rows(kOp, call.value_cache, attributes_.value, call.head_size, library_->soc);
  expect_one_matrix(kOp, call.key_rotation);
  expect_one_matrix(kOp, call.value_rotation);
  expect_counted(kOp, call.query, call.slots);
  if (call.batch == 0 || call.query_heads == 0 || call.tokens == 0) return;

  void* const stream = stream_of(api_, context, kOp);
  for_each_part(call.past_length, call.left_padding, call.batch, [&](Part part) {
    const int64_t keys = keys_of_task(part.past_length + call.tokens, call.tokens,
                                      attributes_.sliding_window, part.left_padding);
    const AttentionCut cut = cut_attention(call.heads, call.query_heads / call.heads,
                                           call.tokens, keys, part.count);
    const int64_t bytes = cut.scratch_bytes(cut.sequences, call.head_size);
    const Scratch scratch(api_, context, kOp, Op::kQuery, static_cast<size_t>(bytes));
    const int64_t end = part.first + part.count;
    for (; part.first < end; part.first += part.count) {
      part.count = std::min(end - part.first, cut.sequences);
      launch(call, part, cut, scratch.data(), stream);
    }
  });
}

void AttentionKernel::launch(const ort::AttentionTensors& call, const Part& part,
                             const AttentionCut& cut, void* scratch, void* stream) const {
  const auto narrow = [](int64_t size) { return static_cast<uint32_t>(size); };
  // One of more keys than slots hides nothing.
  const uint32_t sliding_window = narrow(std::min(attributes_.sliding_window, kMostCounted));
  const auto attend = of_element(library_->attention_float32, library_->attention_float16);
  const auto merge =
      of_element(library_->attention_merge_float32, library_->attention_merge_float16);
  const int64_t bytes = static_cast<int64_t>(element_size(element_));
  const Window& window = attributes_.window;
  const auto new_vectors = [&](const ort::Tensor& tensor) {
    return window.is_on() ? sequence(tensor, part.first, bytes) : nullptr;
  };
  const int64_t tasks = part.count * cut.tasks;
  void* const output = sequence(call.output, part.first, bytes);
  expect_enqueued(
      kOp, "its kernel",
      attend(cores_for(tasks * cut.parts, library_->cores), stream,
             sequence(call.query, part.first, bytes), sequence(call.key_cache, part.first, 1),
             sequence(call.value_cache, part.first, 1), call.key_rotation.data,
             call.key_centroids.data, call.value_rotation.data, call.value_centroids.data,
             call.key_offset.data, call.value_offset.data, call.sink.data,
             new_vectors(call.new_keys), new_vectors(call.new_values), nullptr, output,
             scratch, part.past_length, narrow(part.count), narrow(call.query_heads),
             narrow(call.heads), narrow(call.tokens), narrow(call.slots), narrow(cut.parts),
             narrow(cut.part_tokens), narrow(call.offsets), sliding_window, part.left_padding,
             narrow(attributes_.key.bits), narrow(attributes_.value.bits),
             narrow(window.recent), narrow(window.sinks), narrow(window.overlay_rows),
             narrow(call.head_size), attributes_.scale, attributes_.softcap));
  if (cut.parts == 1) return;
  expect_enqueued(kOp, "the kernel that merges its parts",
                  merge(cores_for(tasks, library_->cores), stream, scratch,
                        call.value_rotation.data, call.value_offset.data, call.sink.data,
                        nullptr, output, part.past_length, narrow(part.count),
                        narrow(call.query_heads), narrow(call.heads), narrow(call.tokens),
                        narrow(cut.parts), narrow(cut.part_tokens), narrow(call.offsets),
                        sliding_window, part.left_padding, narrow(call.head_size)));
}

}  // namespace tq::cann
