// Checks everything that the core takes for granted (core/paged_attention.h), then calls it.
#include "ort/paged_attention_op.h"

#include <new>

#include "core/paged_attention.h"
#include "ort/paging_inputs.h"
#include "tq/codec_spec.h"
#include "tq/operators.h"

namespace tq::ort {
namespace {

using Op = spec::PagedAttention;

constexpr const char* kOp = Op::kName;

void check_cache(const Tensor& cache, const std::vector<int64_t>& like, spec::Codec codec,
                 int head_size) {
  expect_type(kOp, cache, kUint8);
  expect_rank(kOp, cache, 4);
  const int64_t width = expect_rows(kOp, cache, codec, head_size);
  expect_dims(kOp, cache, {like[0], like[1], like[2], width}, "the pages of key_cache");
  expect_fitting(kOp, cache.name, cache.dims, 1);
}

}  // namespace

Signature PagedAttentionKernel::signature(int float_type) { return signature_of<Op>(float_type); }

PagedAttentionKernel::PagedAttentionKernel(const Api& api, const OrtKernelInfo* info,
                                           Element element)
    : api_(api),
      element_(element),
      float_type_(type_of(element)),
      kernels_(choose_kernels(kOp)),
      attributes_(read_common_attributes(api, info, kOp, float_type_)),
      skip_below_(skip_below(kOp)),
      key_rotation_(api, info, Op::kKeyRotation, attributes_.key, false),
      value_rotation_(api, info, Op::kValueRotation, attributes_.value, true) {}

void PagedAttentionKernel::compute(OrtKernelContext* context) {
  const auto input = [&](const spec::Input& one) { return read_input(api_, context, kOp, one); };
  const auto optional = [&](const spec::Input& one) { return read_optional(api_, context, one); };
  const Tensor query = input(Op::kQuery);
  const Tensor key_cache = input(Op::kKeyCache), value_cache = input(Op::kValueCache);
  const Tensor key_rotation = input(Op::kKeyRotation), key_centroids = input(Op::kKeyCentroids);
  const Tensor value_rotation = input(Op::kValueRotation);
  const Tensor value_centroids = input(Op::kValueCentroids);
  const Tensor sink = optional(Op::kHeadSink);
  const Tensor key_offset = optional(Op::kKeyOffset), value_offset = optional(Op::kValueOffset);

  expect_type(kOp, query, float_type_);
  expect_rank(kOp, query, 4);
  expect_rank(kOp, key_cache, 4);
  const int64_t query_heads = query.dims[1], tokens = query.dims[2];
  const int size = expect_head_size(kOp, query);
  expect_dims(kOp, query, {1, query_heads, tokens, size}, "packed requests");
  const int64_t pages = key_cache.dims[0], page_slots = key_cache.dims[1];
  const int64_t heads = key_cache.dims[2];
  check_cache(key_cache, key_cache.dims, attributes_.key, size);
  check_cache(value_cache, key_cache.dims, attributes_.value, size);
  expect_groups(kOp, query_heads, heads);
  expect_tables(kOp, key_rotation, key_centroids, attributes_.key, heads, size);
  expect_tables(kOp, value_rotation, value_centroids, attributes_.value, heads, size);
  if (sink.type != 0) expect_sink(kOp, sink, float_type_, query_heads);
  const PackedRequests packed =
      read_packed(api_, context, kOp, Op::kCumulativeSequenceLength, Op::kPastSeqlens,
                  Op::kBlockTable, tokens, pages, page_slots);
  const int64_t offsets = expect_offsets(kOp, key_offset, value_offset, heads, size);
  const Tensor output = make_output(api_, context, kOp, Op::kOutput, float_type_, query.dims);
  if (tokens == 0) return;

  std::vector<float> own_key, own_value;
  AttentionCall call{};
  call.element = element_;
  call.query = query.data;
  call.output = output.data;
  call.key = view_of(key_cache, attributes_.key, key_centroids);
  call.value = view_of(value_cache, attributes_.value, value_centroids);
  call.key_rotation = key_rotation_.get(key_rotation, own_key);
  call.value_rotation = value_rotation_.get(value_rotation, own_value);
  call.query_heads = query_heads;
  call.heads = heads;
  call.head_size = size;
  call.sink = sink.data;
  call.key_offset = key_offset.as<float>();
  call.value_offset = value_offset.as<float>();
  call.offsets = offsets;
  call.scale = attributes_.scale;
  call.softcap = attributes_.softcap;
  call.skip_below = skip_below_;
  call.causal = true;
  call.sliding_window = attributes_.sliding_window;
  const PagedAttentionCall paged{call,
                                 packed.requests,
                                 packed.cumulative.as<int32_t>(),
                                 packed.past.as<int32_t>(),
                                 packed.table.as<int32_t>(),
                                 packed.columns,
                                 page_slots};
  Pool pool(api_, context);
  const bool complete = paged_attention(kernels_, paged, pool.parallel());
  pool.finish();
  if (!complete) throw std::bad_alloc();
}

}  // namespace tq::ort
