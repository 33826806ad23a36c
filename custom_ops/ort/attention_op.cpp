// Inputs are checked (ort/attention_inputs.h), then the core is called.
#include "ort/attention_op.h"

#include <algorithm>
#include <cstdlib>
#include <new>

#include "core/attention.h"
#include "core/paged_attention.h"
#include "tq/operators.h"

namespace tq::ort {
namespace {

using spec::Attention;
using spec::PagedAttention;

CacheView view_of(const Tensor& cache, spec::Codec codec, const Tensor& centroids) {
  const uint8_t* const rows = cache.as<uint8_t>();
  ptrdiff_t bytes = 1;
  for (const int64_t dim : cache.dims) bytes *= static_cast<ptrdiff_t>(dim);
  return {rows, codec, static_cast<int>(cache.dims[3]), centroids.as<float>(), rows + bytes};
}

float skip_below(const char* op) {
  const char* const text = std::getenv(kSkipVariable);
  if (text == nullptr || *text == '\0') return kSkipBelow;
  char* end = nullptr;
  const float share = std::strtof(text, &end);
  if (*end != '\0' || !(share >= 0.0f && share < 1.0f)) {
    throw OpError(std::string(op) + ": " + kSkipVariable + " is '" + text +
                  "', expected a number from 0 to below 1");
  }
  return share;
}

}  // namespace

template <class Op>
AttentionState::AttentionState(const Api& api, const OrtKernelInfo* info, Element element, Op,
                               const AttentionAttributes& attributes)
    : api_(api),
      element_(element),
      float_type_(type_of(element)),
      kernels_(choose_kernels(Op::kName)),
      attributes_(attributes),
      skip_below_(skip_below(Op::kName)),
      key_rotation_(api, info, Op::kKeyRotation, attributes.key, false),
      value_rotation_(api, info, Op::kValueRotation, attributes.value, true),
      rotary_offset_(api, info, Op::kKeyFrequencies, Op::kKeyOffset) {}

AttentionCall AttentionState::call_of(const AttentionTensors& tensors,
                                      TableStorage& storage) const {
  AttentionCall call{};
  call.element = element_;
  call.query = tensors.query.data;
  call.output = tensors.output.data;
  call.key = view_of(tensors.key_cache, attributes_.key, tensors.key_centroids);
  call.value = view_of(tensors.value_cache, attributes_.value, tensors.value_centroids);
  call.key_rotation = key_rotation_.get(tensors.key_rotation, storage.key);
  call.value_rotation = value_rotation_.get(tensors.value_rotation, storage.value);
  call.batch = tensors.batch;
  call.query_heads = tensors.query_heads;
  call.heads = tensors.heads;
  call.tokens = tensors.tokens;
  call.slots = tensors.slots;
  call.head_size = tensors.head_size;
  call.sink = tensors.sink.data;
  if (tensors.has_rotary_offset) {
    call.rotary_offset =
        rotary_offset_.get(tensors.key_frequencies, tensors.key_offset, storage.rotary_offset);
  } else {
    call.key_offset = tensors.key_offset.as<float>();
    call.key_offsets = tensors.key_offsets;
  }
  call.value_offset = tensors.value_offset.as<float>();
  call.value_offsets = tensors.value_offsets;
  call.scale = attributes_.scale;
  call.softcap = attributes_.softcap;
  call.skip_below = skip_below_;
  call.causal = attributes_.causal;
  call.sliding_window = attributes_.sliding_window;
  call.window = attributes_.window;
  return call;
}

AttentionKernel::AttentionKernel(const Api& api, const OrtKernelInfo* info, Element element)
    : AttentionState(api, info, element, Attention{},
                     read_attention_attributes(api, info, type_of(element))) {}

void AttentionKernel::compute(OrtKernelContext* context) {
  const AttentionTensors tensors = read_attention(api_, context, attributes_, float_type_);
  AttentionState::TableStorage storage;
  AttentionCall call = call_of(tensors, storage);
  call.past_length = tensors.past_length.as<int64_t>();
  call.length_per_batch = tensors.past_length.dims[0] != 1;
  call.left_padding = tensors.left_padding.as<int64_t>();
  call.padding_per_batch = tensors.left_padding.type != 0 && tensors.left_padding.dims[0] != 1;
  call.bias = tensors.bias.data;
  std::copy_n(tensors.bias_stride, 4, call.bias_stride);
  call.new_keys = tensors.new_keys.data;
  call.new_values = tensors.new_values.data;
  Pool pool(api_, context);
  const bool complete = attention(kernels_, call, pool.parallel());
  pool.finish();
  if (!complete) throw std::bad_alloc();
}

PagedAttentionKernel::PagedAttentionKernel(const Api& api, const OrtKernelInfo* info,
                                           Element element)
    : AttentionState(api, info, element, PagedAttention{},
                     read_paged_attention_attributes(api, info, type_of(element))) {}

void PagedAttentionKernel::compute(OrtKernelContext* context) {
  const AttentionTensors tensors = read_paged_attention(api_, context, attributes_, float_type_);
  if (tensors.tokens == 0) return;
  AttentionState::TableStorage storage;
  const PackedRequests& packed = tensors.packed;
  AttentionCall common = call_of(tensors, storage);
  const auto set_pages = [&](CacheView& cache, int64_t stride) {
    cache.page_bytes = tensors.slots * cache.stride;
    cache.stride = static_cast<int>(stride);
  };
  set_pages(common.key, tensors.key_stride);
  set_pages(common.value, tensors.value_stride);
  common.new_keys = tensors.new_keys.data;
  common.new_values = tensors.new_values.data;
  const PagedAttentionCall call{common,
                                packed.requests,
                                packed.cumulative.as<int32_t>(),
                                packed.past.as<int32_t>(),
                                packed.table.as<int32_t>(),
                                packed.columns,
                                tensors.slots};
  Pool pool(api_, context);
  const bool complete = paged_attention(kernels_, call, pool.parallel());
  pool.finish();
  if (!complete) throw std::bad_alloc();
}

}  // namespace tq::ort
