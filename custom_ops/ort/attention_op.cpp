// Checks everything that the core takes for granted (core/attention.h), then calls it.
#include "ort/attention_op.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <new>

#include "core/attention.h"
#include "tq/codec_spec.h"
#include "tq/operators.h"

namespace tq::ort {
namespace {

using Op = spec::Attention;

constexpr const char* kOp = Op::kName;

void check_cache(const Tensor& cache, const std::vector<int64_t>& like, spec::Codec codec,
                 int head_size) {
  expect_type(kOp, cache, kUint8);
  expect_rank(kOp, cache, 4);
  const int64_t width = expect_rows(kOp, cache, codec, head_size);
  expect_dims(kOp, cache, {like[0], like[1], like[2], width},
              "the batch of query and the heads and slots of key_cache");
}

void read_bias(const Tensor& bias, int float_type, const std::vector<int64_t>& full,
               int64_t* stride) {
  expect_type(kOp, bias, float_type);
  expect_rank(kOp, bias, 4);
  int64_t step = 1;
  for (int i = 3; i >= 0; --i) {
    const int64_t dim = bias.dims[i];
    const bool fits = dim == 1 || (i == 3 ? dim >= full[3] : dim == full[i]);
    if (!fits) {
      throw OpError(std::string(kOp) + ": attention_bias has shape " + text(bias.dims) +
                    ", expected one that broadcasts to " + text(full) +
                    " (its last dimension may be longer)");
    }
    stride[i] = dim == 1 ? 0 : step;
    step *= dim;
  }
}

}  // namespace

CacheView view_of(const Tensor& cache, spec::Codec codec, const Tensor& centroids) {
  const uint8_t* const rows = cache.as<uint8_t>();
  ptrdiff_t bytes = 1;
  for (const int64_t dim : cache.dims) bytes *= static_cast<ptrdiff_t>(dim);
  return {rows, codec, static_cast<int>(cache.dims[3]), centroids.as<float>(), rows + bytes};
}

void expect_groups(const char* op, int64_t query_heads, int64_t heads) {
  if (heads == 0 || query_heads % heads != 0) {
    throw OpError(std::string(op) + ": query has " + std::to_string(query_heads) +
                  " heads, expected a multiple of the " + std::to_string(heads) +
                  " heads of key_cache");
  }
}

void expect_sink(const char* op, const Tensor& sink, int float_type, int64_t query_heads) {
  expect_type(op, sink, float_type);
  expect_dims(op, sink, {query_heads}, "one sink per head of query");
}

int64_t expect_offsets(const char* op, const Tensor& key, const Tensor& value, int64_t heads,
                       int head_size) {
  if (key.type == 0 && value.type == 0) return 0;
  for (const Tensor* one : {&key, &value}) {
    if (one->type == 0) {
      throw OpError(std::string(op) + ": " + one->name +
                    " is missing, expected key_offset and value_offset together");
    }
  }
  const int64_t offsets = expect_offset(op, key, heads, head_size);
  expect_offset(op, value, heads, head_size);
  expect_dims(op, value, key.dims, "the key_offset beside it");
  return offsets;
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

Signature AttentionKernel::signature(int float_type) {
  return signature_of<Op>(float_type);
}

AttentionAttributes read_common_attributes(const Api& api, const OrtKernelInfo* info,
                                           const char* name, int float_type) {
  AttentionAttributes read{};
  read.key = read_codec(api, info, name, "key_", float_type);
  read.value = read_codec(api, info, name, "value_", float_type);
  read.scale = read_float(api, info, name, "scale");
  read.softcap = read_float(api, info, name, "softcap");
  read.sliding_window = read_int(api, info, name, "sliding_window");
  const std::string op = std::string(name) + ": ";
  if (read.sliding_window < 0) {
    throw OpError(op + "sliding_window is " + std::to_string(read.sliding_window) +
                  ", expected 0 for none or a number of positions");
  }
  if (!std::isfinite(read.scale)) throw OpError(op + "scale is not a finite number");
  if (!(read.softcap >= 0.0f) || std::isinf(read.softcap)) {
    throw OpError(op + "softcap is " + std::to_string(read.softcap) +
                  ", expected 0 for none or a positive number");
  }
  read.causal = true;
  return read;
}

AttentionAttributes read_attention_attributes(const Api& api, const OrtKernelInfo* info,
                                              int float_type) {
  AttentionAttributes read = read_common_attributes(api, info, kOp, float_type);
  const int64_t causal = read_int(api, info, kOp, "causal");
  if (causal != 0 && causal != 1) {
    throw OpError(std::string(kOp) + ": causal is " + std::to_string(causal) +
                  ", expected 0 or 1");
  }
  read.causal = causal == 1;
  const bool is_raw =
      read.key.kind == spec::Kind::kRaw || read.value.kind == spec::Kind::kRaw;
  read.window = read_window(api, info, kOp, is_raw);
  return read;
}

AttentionTensors read_attention(const Api& api, OrtKernelContext* context,
                                const AttentionAttributes& attributes, int float_type) {
  AttentionTensors call{};
  call.query = read_input(api, context, kOp, Op::kQuery);
  call.key_cache = read_input(api, context, kOp, Op::kKeyCache);
  call.value_cache = read_input(api, context, kOp, Op::kValueCache);
  call.past_length = read_input(api, context, kOp, Op::kPastLength);
  call.key_rotation = read_input(api, context, kOp, Op::kKeyRotation);
  call.key_centroids = read_input(api, context, kOp, Op::kKeyCentroids);
  call.value_rotation = read_input(api, context, kOp, Op::kValueRotation);
  call.value_centroids = read_input(api, context, kOp, Op::kValueCentroids);
  call.bias = read_optional(api, context, Op::kAttentionBias);
  call.sink = read_optional(api, context, Op::kHeadSink);
  call.key_offset = read_optional(api, context, Op::kKeyOffset);
  call.value_offset = read_optional(api, context, Op::kValueOffset);
  call.new_keys = read_optional(api, context, Op::kNewKeys);
  call.new_values = read_optional(api, context, Op::kNewValues);
  call.left_padding = read_optional(api, context, Op::kLeftPadding);

  expect_type(kOp, call.query, float_type);
  expect_rank(kOp, call.query, 4);
  expect_rank(kOp, call.key_cache, 4);
  const std::vector<int64_t>& dims = call.query.dims;
  const int64_t batch = dims[0], query_heads = dims[1], tokens = dims[2];
  const int size = expect_head_size(kOp, call.query);
  const int64_t heads = call.key_cache.dims[1], slots = call.key_cache.dims[2];
  const std::vector<int64_t> like{batch, heads, slots};
  check_cache(call.key_cache, like, attributes.key, size);
  check_cache(call.value_cache, like, attributes.value, size);
  expect_groups(kOp, query_heads, heads);
  expect_tables(kOp, call.key_rotation, call.key_centroids, attributes.key, heads, size);
  expect_tables(kOp, call.value_rotation, call.value_centroids, attributes.value, heads, size);
  const Window& window = attributes.window;
  for (const Tensor* cache : {&call.key_cache, &call.value_cache}) {
    expect_overlay(kOp, window, cache->name, size, cache->dims[3]);
  }
  const int64_t room = slots - window.overlay_rows;
  const int64_t longest =
      check_lengths(kOp, call.past_length, batch, std::max<int64_t>(0, room), "key_cache");
  if (tokens > room - longest) {
    throw OpError(std::string(kOp) + ": past_length " + std::to_string(longest) + " plus " +
                  std::to_string(tokens) + " new tokens is more than the " +
                  std::to_string(room) + " slots of key_cache");
  }
  expect_tokens(kOp, window, longest, tokens);
  if (call.left_padding.type != 0) {
    check_lengths(kOp, call.left_padding, batch, room, "key_cache");
  }
  for (const Tensor* one : {&call.new_keys, &call.new_values}) {
    if (!window.is_on()) break;
    expect_type(kOp, *one, float_type);
    expect_dims(kOp, *one, {batch, heads, tokens, size}, "the new tokens of a window");
  }
  if (call.bias.type != 0) {
    const std::vector<int64_t> full{batch, query_heads, tokens, longest + tokens};
    read_bias(call.bias, float_type, full, call.bias_stride);
  }
  if (call.sink.type != 0) expect_sink(kOp, call.sink, float_type, query_heads);
  call.offsets = expect_offsets(kOp, call.key_offset, call.value_offset, heads, size);
  call.output = make_output(api, context, kOp, Op::kOutput, float_type, call.query.dims);

  call.batch = batch;
  call.query_heads = query_heads;
  call.heads = heads;
  call.tokens = tokens;
  call.slots = slots;
  call.head_size = size;
  return call;
}

AttentionKernel::AttentionKernel(const Api& api, const OrtKernelInfo* info, Element element)
    : api_(api),
      element_(element),
      float_type_(type_of(element)),
      kernels_(choose_kernels(kOp)),
      attributes_(read_attention_attributes(api, info, float_type_)),
      skip_below_(skip_below(kOp)),
      key_rotation_(api, info, Op::kKeyRotation, attributes_.key, false),
      value_rotation_(api, info, Op::kValueRotation, attributes_.value, true) {}

void AttentionKernel::compute(OrtKernelContext* context) {
  const AttentionTensors given = read_attention(api_, context, attributes_, float_type_);
  std::vector<float> own_key, own_value;
  AttentionCall call{};
  call.element = element_;
  call.query = given.query.data;
  call.key = view_of(given.key_cache, attributes_.key, given.key_centroids);
  call.value = view_of(given.value_cache, attributes_.value, given.value_centroids);
  call.key_rotation = key_rotation_.get(given.key_rotation, own_key);
  call.value_rotation = value_rotation_.get(given.value_rotation, own_value);
  call.past_length = given.past_length.as<int64_t>();
  call.length_per_batch = given.past_length.dims[0] != 1;
  call.left_padding = given.left_padding.as<int64_t>();
  call.padding_per_batch = given.left_padding.type != 0 && given.left_padding.dims[0] != 1;
  call.bias = given.bias.data;
  std::copy_n(given.bias_stride, 4, call.bias_stride);
  call.sink = given.sink.data;
  call.key_offset = given.key_offset.as<float>();
  call.value_offset = given.value_offset.as<float>();
  call.offsets = given.offsets;
  call.output = given.output.data;
  call.batch = given.batch;
  call.query_heads = given.query_heads;
  call.heads = given.heads;
  call.tokens = given.tokens;
  call.slots = given.slots;
  call.head_size = given.head_size;
  call.scale = attributes_.scale;
  call.softcap = attributes_.softcap;
  call.skip_below = skip_below_;
  call.causal = attributes_.causal;
  call.sliding_window = attributes_.sliding_window;
  call.window = attributes_.window;
  call.new_keys = given.new_keys.data;
  call.new_values = given.new_values.data;
  Pool pool(api_, context);
  const bool complete = attention(kernels_, call, pool.parallel());
  pool.finish();
  if (!complete) throw std::bad_alloc();
}

}  // namespace tq::ort
