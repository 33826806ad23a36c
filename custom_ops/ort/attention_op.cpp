// Checks everything that the core takes for granted (core/attention.h), then calls it.
#include "ort/attention_op.h"

#include <cmath>
#include <new>

#include "core/attention.h"
#include "tq/codec_spec.h"

namespace tq::ort {
namespace {

constexpr const char* kOp = spec::kAttentionOp;
constexpr size_t kValueRotation = 6;

bool is_square(const Tensor& tensor) {
  return tensor.type == kFloat && tensor.dims.size() == 2 && tensor.dims[0] == tensor.dims[1] &&
         tensor.dims[0] <= spec::kMaxHeadSize;
}

void check_cache(const Tensor& cache, const std::vector<int64_t>& like, const Codec& codec,
                 int head_size) {
  expect_type(kOp, cache, kUint8);
  expect_rank(kOp, cache, 4);
  const int64_t width = codec.row_bytes(head_size);
  if (cache.dims[3] != width) {
    throw OpError(std::string(kOp) + ": " + cache.name + " has row width " +
                  std::to_string(cache.dims[3]) + ", but " + codec.rows_of(head_size) + " have " +
                  std::to_string(width) + " bytes");
  }
  expect_dims(kOp, cache, {like[0], like[1], like[2], width},
              "the batch of query and the heads and slots of key_cache");
}

void check_tables(const Tensor& rotation, const Tensor& centroids, const Codec& codec,
                  int head_size) {
  expect_type(kOp, rotation, kFloat);
  expect_type(kOp, centroids, kFloat);
  if (codec.raw) return;
  expect_dims(kOp, rotation, {head_size, head_size}, "this head size");
  expect_dims(kOp, centroids, {1 << codec.bits}, "these bits");
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
           {float_type, kOptional}},
          {{float_type, kRequired}}};
}

AttentionKernel::AttentionKernel(const Api& api, const OrtKernelInfo* info, Element element)
    : api_(api),
      element_(element),
      float_type_(type_of(element)),
      kernels_(choose_kernels(kOp)),
      key_(read_codec(api, info, kOp, "key_", float_type_)),
      value_(read_codec(api, info, kOp, "value_", float_type_)),
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
  int is_constant = 0;
  const OrtValue* value = nullptr;
  check(api_.kernel_info_constant_input(info, kValueRotation, &is_constant, &value));
  if (!value_.raw && is_constant != 0 && value != nullptr) {
    const Tensor rotation = read_tensor(api_, value, "value_rotation");
    if (is_square(rotation)) {
      constant_transposed_.resize(static_cast<size_t>(rotation.dims[0] * rotation.dims[0]));
      transpose(rotation.as<float>(), static_cast<int>(rotation.dims[0]),
                constant_transposed_.data());
    }
  }
}

const float* AttentionKernel::transposed(const Tensor& value_rotation,
                                         std::vector<float>& own) const {
  if (value_.raw) return nullptr;
  const size_t size = static_cast<size_t>(value_rotation.dims[0]);
  if (constant_transposed_.size() == size * size) return constant_transposed_.data();
  own.resize(size * size);
  transpose(value_rotation.as<float>(), static_cast<int>(size), own.data());
  return own.data();
}

void AttentionKernel::compute(OrtKernelContext* context) {
  const Tensor query = read_input(api_, context, 0, kOp, "query");
  const Tensor key_cache = read_input(api_, context, 1, kOp, "key_cache");
  const Tensor value_cache = read_input(api_, context, 2, kOp, "value_cache");
  const Tensor past_length = read_input(api_, context, 3, kOp, "past_length");
  const Tensor key_rotation = read_input(api_, context, 4, kOp, "key_rotation");
  const Tensor key_centroids = read_input(api_, context, 5, kOp, "key_centroids");
  const Tensor value_rotation = read_input(api_, context, kValueRotation, kOp, "value_rotation");
  const Tensor value_centroids = read_input(api_, context, 7, kOp, "value_centroids");
  const Tensor bias = read_optional(api_, context, 8, "attention_bias");
  const Tensor sink = read_optional(api_, context, 9, "head_sink");

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
  check_tables(key_rotation, key_centroids, key_, size);
  check_tables(value_rotation, value_centroids, value_, size);
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
  call.output = make_output(api_, context, kOp, "output", float_type_, query.dims).data;

  std::vector<float> own;
  call.element = element_;
  call.query = query.data;
  call.key = {key_cache.as<uint8_t>(), key_.bits, key_centroids.as<float>(), key_.raw};
  call.value = {value_cache.as<uint8_t>(), value_.bits, value_centroids.as<float>(), value_.raw};
  call.key_rotation = key_rotation.as<float>();
  call.value_rotation_transposed = transposed(value_rotation, own);
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
