// Shapes are compared before any data is read; the contract is in attention_inputs.h.
#include "ort/attention_inputs.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "ort/codec_inputs.h"
#include "ort/rotary_input.h"
#include "ort/window_inputs.h"
#include "tq/operators.h"

namespace tq::ort {
namespace {

// The inputs that both operators have.
template <class Op>
AttentionTensors read_shared(const Api& api, OrtKernelContext* context) {
  const auto required = [&](const spec::Input& input) {
    return read_input(api, context, Op::kName, input);
  };
  AttentionTensors call{};
  call.query = required(Op::kQuery);
  call.key_cache = required(Op::kKeyCache);
  call.value_cache = required(Op::kValueCache);
  call.key_rotation = required(Op::kKeyRotation);
  call.key_centroids = required(Op::kKeyCentroids);
  call.value_rotation = required(Op::kValueRotation);
  call.value_centroids = required(Op::kValueCentroids);
  call.sink = read_optional(api, context, Op::kHeadSink);
  call.key_offset = read_optional(api, context, Op::kKeyOffset);
  call.value_offset = read_optional(api, context, Op::kValueOffset);
  call.key_frequencies = read_optional(api, context, Op::kKeyFrequencies);
  return call;
}

// Queries, and the rank of the caches.
void check_query(const char* op, AttentionTensors& call, int float_type) {
  expect_type(op, call.query, float_type);
  expect_rank(op, call.query, 4);
  expect_rank(op, call.key_cache, 4);
  call.batch = call.query.dims[0];
  call.query_heads = call.query.dims[1];
  call.tokens = call.query.dims[2];
  call.head_size = expect_head_size(op, call.query);
}

// Both caches, whose first dimensions are these, and what belongs to their codecs.
void check_caches(const char* op, const AttentionTensors& call,
                  const AttentionAttributes& attributes, std::vector<int64_t> dims,
                  const char* why) {
  dims.push_back(0);
  const auto check_cache = [&](const Tensor& cache, spec::Codec codec) {
    expect_type(op, cache, kUint8);
    expect_rank(op, cache, 4);
    dims.back() = expect_rows(op, cache, codec, call.head_size);
    expect_dims(op, cache, dims, why);
  };
  check_cache(call.key_cache, attributes.key);
  check_cache(call.value_cache, attributes.value);
  if (call.heads == 0 || call.query_heads % call.heads != 0) {
    throw OpError(std::string(op) + ": query has " + std::to_string(call.query_heads) +
                  " heads, expected a multiple of the " + std::to_string(call.heads) +
                  " heads of key_cache");
  }
  expect_tables(op, call.key_rotation, call.key_centroids, attributes.key, call.head_size);
  expect_tables(op, call.value_rotation, call.value_centroids, attributes.value, call.head_size);
}

void expect_new(const char* op, const AttentionTensors& call, int64_t batch, int float_type) {
  for (const Tensor* vectors : {&call.new_keys, &call.new_values}) {
    expect_type(op, *vectors, float_type);
    expect_dims(op, *vectors, {batch, call.heads, call.tokens, call.head_size},
                "the new tokens of a window");
  }
}

void check_sink(const char* op, const AttentionTensors& call, int float_type) {
  if (call.sink.type == 0) return;
  expect_type(op, call.sink, float_type);
  expect_dims(op, call.sink, {call.query_heads}, "one sink per head of query");
}

// Fills how many rows the offsets have, and whether that of keys turns.
void check_offsets(const char* op, AttentionTensors& call) {
  const Tensor &key = call.key_offset, &value = call.value_offset;
  call.has_rotary_offset =
      expect_frequencies(op, call.key_frequencies, key, call.heads, call.head_size);
  if (key.type == 0 && value.type == 0) return;
  for (const Tensor* offset : {&key, &value}) {
    if (offset->type == 0) {
      throw OpError(std::string(op) + ": " + offset->name +
                    " is missing, expected key_offset and value_offset together");
    }
  }
  call.key_offsets = expect_offset(op, key, call.heads, call.head_size);
  call.value_offsets = expect_offset(op, value, call.heads, call.head_size);
  if (call.has_rotary_offset) return;
  expect_dims(op, value, key.dims, "the key_offset beside it");
}

// Fills the strides of the bias; `keys` are those of the longest sequence.
void check_bias(const char* op, AttentionTensors& call, int64_t keys, int float_type) {
  const Tensor& bias = call.bias;
  if (bias.type == 0) return;
  expect_type(op, bias, float_type);
  expect_rank(op, bias, 4);
  const std::vector<int64_t> full{call.batch, call.query_heads, call.tokens, keys};
  int64_t step = 1;
  for (int i = 3; i >= 0; --i) {
    const int64_t dim = bias.dims[i];
    const bool fits = dim == 1 || (i == 3 ? dim >= full[3] : dim == full[i]);
    if (!fits) {
      throw OpError(std::string(op) + ": attention_bias has shape " + text(bias.dims) +
                    ", expected one that broadcasts to " + text(full) +
                    " (its last dimension may be longer)");
    }
    call.bias_stride[i] = dim == 1 ? 0 : step;
    step *= dim;
  }
}

AttentionAttributes read_shared_attributes(const Api& api, const OrtKernelInfo* info,
                                           const char* op, int float_type) {
  AttentionAttributes read{};
  read.key = read_codec(api, info, op, "key_", float_type);
  read.value = read_codec(api, info, op, "value_", float_type);
  read.scale = read_float(api, info, op, "scale");
  read.softcap = read_float(api, info, op, "softcap");
  read.sliding_window = read_int(api, info, op, "sliding_window");
  const std::string where = std::string(op) + ": ";
  if (read.sliding_window < 0) {
    throw OpError(where + "sliding_window is " + std::to_string(read.sliding_window) +
                  ", expected 0 for none or a number of positions");
  }
  if (!std::isfinite(read.scale)) throw OpError(where + "scale is not a finite number");
  if (!(read.softcap >= 0.0f) || std::isinf(read.softcap)) {
    throw OpError(where + "softcap is " + std::to_string(read.softcap) +
                  ", expected 0 for none or a positive number");
  }
  return read;
}

}  // namespace

AttentionAttributes read_attention_attributes(const Api& api, const OrtKernelInfo* info,
                                              int float_type) {
  constexpr const char* kOp = spec::Attention::kName;
  AttentionAttributes read = read_shared_attributes(api, info, kOp, float_type);
  const int64_t causal = read_int(api, info, kOp, "causal");
  if (causal != 0 && causal != 1) {
    throw OpError(std::string(kOp) + ": causal is " + std::to_string(causal) + ", expected 0 or 1");
  }
  read.causal = causal == 1;
  const bool is_raw = read.key.kind == spec::Kind::kRaw || read.value.kind == spec::Kind::kRaw;
  read.window = read_window(api, info, kOp, is_raw);
  return read;
}

AttentionAttributes read_paged_attention_attributes(const Api& api, const OrtKernelInfo* info,
                                                    int float_type) {
  AttentionAttributes read =
      read_shared_attributes(api, info, spec::PagedAttention::kName, float_type);
  read.causal = true;
  const bool is_raw = read.key.kind == spec::Kind::kRaw || read.value.kind == spec::Kind::kRaw;
  read.paged_window = read_paged_window(api, info, spec::PagedAttention::kName, is_raw);
  read.window = read.paged_window.entries;
  return read;
}

AttentionTensors read_attention(const Api& api, OrtKernelContext* context,
                                const AttentionAttributes& attributes, int float_type) {
  using Op = spec::Attention;
  constexpr const char* kOp = Op::kName;
  AttentionTensors call = read_shared<Op>(api, context);
  call.past_length = read_input(api, context, kOp, Op::kPastLength);
  call.bias = read_optional(api, context, Op::kAttentionBias);
  call.new_keys = read_optional(api, context, Op::kNewKeys);
  call.new_values = read_optional(api, context, Op::kNewValues);
  call.left_padding = read_optional(api, context, Op::kLeftPadding);

  check_query(kOp, call, float_type);
  call.heads = call.key_cache.dims[1];
  call.slots = call.key_cache.dims[2];
  check_caches(kOp, call, attributes, {call.batch, call.heads, call.slots},
               "the batch of query and the heads and slots of key_cache");
  const Window& window = attributes.window;
  for (const Tensor* cache : {&call.key_cache, &call.value_cache}) {
    const spec::Codec codec = cache == &call.key_cache ? attributes.key : attributes.value;
    expect_planes(kOp, window, cache->name, codec, call.head_size, cache->dims[3]);
    expect_overlay(kOp, window, cache->name, call.head_size, cache->dims[3]);
  }
  const int64_t room = call.slots - window.overlay_rows;
  const int64_t longest =
      check_lengths(kOp, call.past_length, call.batch, std::max<int64_t>(0, room), "key_cache");
  if (call.tokens > room - longest) {
    throw OpError(std::string(kOp) + ": past_length " + std::to_string(longest) + " plus " +
                  std::to_string(call.tokens) + " new tokens is more than the " +
                  std::to_string(room) + " slots of key_cache");
  }
  expect_tokens(kOp, window, longest, call.tokens);
  if (call.left_padding.type != 0) {
    check_lengths(kOp, call.left_padding, call.batch, room, "key_cache");
  }
  if (window.is_on()) expect_new(kOp, call, call.batch, float_type);
  check_bias(kOp, call, longest + call.tokens, float_type);
  check_sink(kOp, call, float_type);
  check_offsets(kOp, call);
  call.output = make_output(api, context, kOp, Op::kOutput, float_type, call.query.dims);
  return call;
}

AttentionTensors read_paged_attention(const Api& api, OrtKernelContext* context,
                                      const AttentionAttributes& attributes, int float_type) {
  using Op = spec::PagedAttention;
  constexpr const char* kOp = Op::kName;
  AttentionTensors call = read_shared<Op>(api, context);
  check_query(kOp, call, float_type);
  expect_dims(kOp, call.query, {1, call.query_heads, call.tokens, call.head_size},
              "packed requests");
  const int64_t pages = call.key_cache.dims[0];
  call.slots = call.key_cache.dims[1];
  call.heads = call.key_cache.dims[2];
  check_caches(kOp, call, attributes, {pages, call.slots, call.heads}, "the pages of key_cache");
  for (const Tensor* cache : {&call.key_cache, &call.value_cache}) {
    expect_fitting(kOp, cache->name, cache->dims, 1);
  }
  const PagedWindow& window = attributes.paged_window;
  const auto stride_of = [&](const Tensor& cache, spec::Codec codec) {
    return expect_page(kOp, window, cache, spec::row_bytes(codec, call.head_size), call.head_size);
  };
  call.key_stride = stride_of(call.key_cache, attributes.key);
  call.value_stride = stride_of(call.value_cache, attributes.value);
  if (window.entries.is_on()) {
    expect_dims(kOp, call.value_cache, call.key_cache.dims, "the key_cache, with exact tokens");
    call.new_keys = read_optional(api, context, Op::kNewKeys);
    call.new_values = read_optional(api, context, Op::kNewValues);
    expect_new(kOp, call, 1, float_type);
  }
  check_sink(kOp, call, float_type);
  call.packed = read_packed(api, context, kOp, Op::kCumulativeSequenceLength, Op::kPastSeqlens,
                            Op::kBlockTable, call.tokens, pages, call.slots);
  check_offsets(kOp, call);
  call.output = make_output(api, context, kOp, Op::kOutput, float_type, call.query.dims);
  return call;
}

}  // namespace tq::ort
