// Checks everything that the core takes for granted (core/attention.h), then calls it.
#include "ort/attention_op.h"

#include <cmath>
#include <new>

#include "core/attention.h"
#include "tq/codec_spec.h"

namespace tq::ort {
namespace {

constexpr const char* kOp = spec::kAttentionOp;
constexpr size_t kKeyRotation = 4, kValueRotation = 6;

void check_cache(const Tensor& cache, const std::vector<int64_t>& like, spec::Codec codec,
                 int head_size) {
  expect_type(kOp, cache, kUint8);
  expect_rank(kOp, cache, 4);
  const int64_t width = expect_rows(kOp, cache, codec, head_size);
  expect_dims(kOp, cache, {like[0], like[1], like[2], width},
              "the batch of query and the heads and slots of key_cache");
}

CacheView view(const Tensor& cache, spec::Codec codec, const Tensor& centroids) {
  return {cache.as<uint8_t>(), codec, static_cast<int>(cache.dims[3]), centroids.as<float>()};
}

// Strides of the bias in elements, zero where it is broadcast.
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

void check_sink(const Tensor& sink, int float_type, int64_t query_heads) {
  expect_type(kOp, sink, float_type);
  expect_dims(kOp, sink, {query_heads}, "one sink per head of query");
}

void read_offsets(const Tensor& key, const Tensor& value, int64_t heads, int head_size,
                  AttentionCall& call) {
  for (const Tensor* one : {&key, &value}) {
    if (one->type == 0) {
      throw OpError(std::string(kOp) + ": " + one->name +
                    " is missing, expected key_offset and value_offset together");
    }
  }
  call.offsets = expect_offset(kOp, key, heads, head_size);
  expect_offset(kOp, value, heads, head_size);
  expect_dims(kOp, value, key.dims, "the key_offset beside it");
  call.key_offset = key.as<float>();
  call.value_offset = value.as<float>();
}

}  // namespace

Signature AttentionKernel::signature(int float_type) {
  return {kOp,
          {{float_type, kRequired},
           {kUint8, kRequired},
           {kUint8, kRequired},
           {kInt64, kRequired},
           {kFloat, kRequired},
           {kFloat, kRequired},
           {kFloat, kRequired},
           {kFloat, kRequired},
           {float_type, kOptional},
           {float_type, kOptional},
           {kFloat, kOptional},
           {kFloat, kOptional}},
          {{float_type, kRequired}}};
}

AttentionKernel::AttentionKernel(const Api& api, const OrtKernelInfo* info, Element element)
    : api_(api),
      element_(element),
      float_type_(type_of(element)),
      kernels_(choose_kernels(kOp)),
      key_(read_codec(api, info, kOp, "key_", float_type_)),
      value_(read_codec(api, info, kOp, "value_", float_type_)),
      key_rotation_(api, info, kKeyRotation, key_, false),
      value_rotation_(api, info, kValueRotation, value_, true),
      scale_(read_float(api, info, kOp, "scale")),
      softcap_(read_float(api, info, kOp, "softcap")),
      sliding_window_(read_int(api, info, kOp, "sliding_window")) {
  const int64_t causal = read_int(api, info, kOp, "causal");
  const std::string op = std::string(kOp) + ": ";
  if (causal != 0 && causal != 1) {
    throw OpError(op + "causal is " + std::to_string(causal) + ", expected 0 or 1");
  }
  causal_ = causal == 1;
  if (sliding_window_ < 0) {
    throw OpError(op + "sliding_window is " + std::to_string(sliding_window_) +
                  ", expected 0 for none or a number of positions");
  }
  if (!std::isfinite(scale_)) throw OpError(op + "scale is not a finite number");
  if (!(softcap_ >= 0.0f) || std::isinf(softcap_)) {
    throw OpError(op + "softcap is " + std::to_string(softcap_) +
                  ", expected 0 for none or a positive number");
  }
}

void AttentionKernel::compute(OrtKernelContext* context) {
  const Tensor query = read_input(api_, context, 0, kOp, "query");
  const Tensor key_cache = read_input(api_, context, 1, kOp, "key_cache");
  const Tensor value_cache = read_input(api_, context, 2, kOp, "value_cache");
  const Tensor past_length = read_input(api_, context, 3, kOp, "past_length");
  const Tensor key_rotation = read_input(api_, context, kKeyRotation, kOp, "key_rotation");
  const Tensor key_centroids = read_input(api_, context, 5, kOp, "key_centroids");
  const Tensor value_rotation = read_input(api_, context, kValueRotation, kOp, "value_rotation");
  const Tensor value_centroids = read_input(api_, context, 7, kOp, "value_centroids");
  const Tensor bias = read_optional(api_, context, 8, "attention_bias");
  const Tensor sink = read_optional(api_, context, 9, "head_sink");
  const Tensor key_offset = read_optional(api_, context, 10, "key_offset");
  const Tensor value_offset = read_optional(api_, context, 11, "value_offset");

  expect_type(kOp, query, float_type_);
  expect_rank(kOp, query, 4);
  expect_rank(kOp, key_cache, 4);
  const int64_t batch = query.dims[0], query_heads = query.dims[1], tokens = query.dims[2];
  const int size = expect_head_size(kOp, query);
  const int64_t heads = key_cache.dims[1], slots = key_cache.dims[2];
  const std::vector<int64_t> like{batch, heads, slots};
  check_cache(key_cache, like, key_, size);
  check_cache(value_cache, like, value_, size);
  if (heads == 0 || query_heads % heads != 0) {
    throw OpError(std::string(kOp) + ": query has " + std::to_string(query_heads) +
                  " heads, expected a multiple of the " + std::to_string(heads) +
                  " heads of key_cache");
  }
  expect_tables(kOp, key_rotation, key_centroids, key_, size);
  expect_tables(kOp, value_rotation, value_centroids, value_, size);
  const int64_t longest = check_lengths(kOp, past_length, batch, slots, "key_cache");
  if (tokens > slots - longest) {
    throw OpError(std::string(kOp) + ": past_length " + std::to_string(longest) + " plus " +
                  std::to_string(tokens) + " new tokens is more than the " +
                  std::to_string(slots) + " slots of key_cache");
  }

  AttentionCall call{};
  if (bias.type != 0) {
    read_bias(bias, float_type_, {batch, query_heads, tokens, longest + tokens}, call.bias_stride);
    call.bias = bias.data;
  }
  if (sink.type != 0) {
    check_sink(sink, float_type_, query_heads);
    call.sink = sink.data;
  }
  if (key_offset.type != 0 || value_offset.type != 0) {
    read_offsets(key_offset, value_offset, heads, size, call);
  }
  call.output = make_output(api_, context, kOp, "output", float_type_, query.dims).data;

  std::vector<float> own_key, own_value;
  call.element = element_;
  call.query = query.data;
  call.key = view(key_cache, key_, key_centroids);
  call.value = view(value_cache, value_, value_centroids);
  call.key_rotation = key_rotation_.get(key_rotation, own_key);
  call.value_rotation = value_rotation_.get(value_rotation, own_value);
  call.past_length = past_length.as<int64_t>();
  call.length_per_batch = past_length.dims[0] != 1;
  call.batch = batch;
  call.query_heads = query_heads;
  call.heads = heads;
  call.tokens = tokens;
  call.slots = slots;
  call.head_size = size;
  call.scale = scale_;
  call.softcap = softcap_;
  call.causal = causal_;
  call.sliding_window = sliding_window_;
  Pool pool(api_, context);
  const bool complete = attention(kernels_, call, pool.parallel());
  pool.finish();
  if (!complete) throw std::bad_alloc();
}

}  // namespace tq::ort
