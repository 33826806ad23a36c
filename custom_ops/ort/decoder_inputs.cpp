// Shapes are compared before any data is read; the contract is in decoder_inputs.h.
#include "ort/decoder_inputs.h"

#include <limits>

#include "tq/operators.h"

namespace tq::ort {
namespace {

// A tensor of the operator's floats.
Tensor read_floats(const Api& api, const OrtKernelContext* context, const char* op,
                   const spec::Input& input, int float_type) {
  Tensor tensor = read_input(api, context, op, input);
  expect_type(op, tensor, float_type);
  return tensor;
}

int64_t bytes_of(int float_type) {
  return static_cast<int64_t>(element_size(element_of(float_type)));
}

// Elements of a tensor. Where one dimension is zero the others may be as large as they like.
int64_t count_of(const char* op, const Tensor& tensor) {
  return expect_fitting(op, tensor.name, tensor.dims, 1);
}

// A table [P, half], of the cosines or the sines.
void expect_angles(const char* op, const Tensor& table, int64_t rows, int64_t half) {
  expect_type(op, table, kFloat);
  expect_dims(op, table, {rows, half}, "the head size of X and the rows of cos_cache");
}

// The first value outside of [least, end) is refused, with its place and value.
void expect_in_range(const char* op, const Tensor& numbers, int64_t least, int64_t end,
                     const std::string& rows_of) {
  const int64_t* const values = numbers.as<int64_t>();
  const int64_t count = count_of(op, numbers);
  for (int64_t i = 0; i < count; ++i) {
    if (values[i] >= least && values[i] < end) continue;
    const int64_t width = numbers.dims.back();
    std::vector<int64_t> place{i % width};
    if (numbers.dims.size() == 2) place.insert(place.begin(), i / width);
    throw OpError(std::string(op) + ": " + numbers.name + text(place) + " is " +
                  std::to_string(values[i]) + ", expected " + std::to_string(least) +
                  " or more and less than the " + std::to_string(end) + " rows of " + rows_of);
  }
}

}  // namespace

float read_epsilon(const Api& api, const OrtKernelInfo* info) {
  const char* const op = spec::RmsNormalization::kName;
  const float epsilon = read_float(api, info, op, "epsilon");
  if (!(epsilon >= 0.0f && epsilon <= std::numeric_limits<float>::max())) {
    throw OpError(std::string(op) + ": epsilon is " + std::to_string(epsilon) +
                  ", expected a finite number that is not negative");
  }
  return epsilon;
}

void expect_perm(const Api& api, const OrtKernelInfo* info) {
  const char* const op = spec::Transpose::kName;
  const std::vector<int64_t> perm = read_ints(api, info, op, "perm");
  const std::vector<int64_t> expected{0, 2, 1, 3};
  if (perm != expected) {
    throw OpError(std::string(op) + ": perm is " + text(perm) + ", expected " + text(expected));
  }
}

RmsNormalizationTensors read_rms_normalization(const Api& api, OrtKernelContext* context,
                                               int float_type) {
  using Op = spec::RmsNormalization;
  const char* const op = Op::kName;
  RmsNormalizationTensors call{};
  call.x = read_floats(api, context, op, Op::kX, float_type);
  call.scale = read_floats(api, context, op, Op::kScale, float_type);
  if (call.x.dims.empty()) {
    throw OpError(std::string(op) + ": X has shape [], expected 1 dimension or more");
  }
  call.width = call.x.dims.back();
  expect_dims(op, call.scale, {call.width}, "the last dimension of X");
  call.rows = call.width == 0 ? 0 : count_of(op, call.x) / call.width;
  call.y = make_output(api, context, op, Op::kY, float_type, call.x.dims);
  return call;
}

RotaryEmbeddingTensors read_rotary_embedding(const Api& api, OrtKernelContext* context,
                                             int float_type) {
  using Op = spec::RotaryEmbedding;
  const char* const op = Op::kName;
  RotaryEmbeddingTensors call{};
  call.x = read_floats(api, context, op, Op::kX, float_type);
  call.cosines = read_input(api, context, op, Op::kCosCache);
  call.sines = read_input(api, context, op, Op::kSinCache);
  call.positions = read_input(api, context, op, Op::kPositionIds);
  expect_rank(op, call.x, 4);
  call.batch = call.x.dims[0];
  call.heads = call.x.dims[1];
  call.tokens = call.x.dims[2];
  call.head_size = call.x.dims[3];
  if (call.head_size % 2 != 0) {
    throw OpError(std::string(op) + ": X has head size " + std::to_string(call.head_size) +
                  ", expected an even number");
  }
  expect_rank(op, call.cosines, 2);
  const int64_t rows = call.cosines.dims[0];
  expect_angles(op, call.cosines, rows, call.head_size / 2);
  expect_angles(op, call.sines, rows, call.head_size / 2);
  expect_type(op, call.positions, kInt64);
  expect_rank(op, call.positions, 2);
  if (call.positions.dims[0] != 1) {
    expect_dims(op, call.positions, {call.batch, call.tokens},
                "the batch and tokens of X, or one row for all");
  }
  expect_dims(op, call.positions, {call.positions.dims[0], call.tokens}, "the tokens of X");
  expect_in_range(op, call.positions, 0, rows, "cos_cache");
  call.count = count_of(op, call.x);
  call.y = make_output(api, context, op, Op::kY, float_type, call.x.dims);
  return call;
}

SwishTensors read_swish(const Api& api, OrtKernelContext* context, int float_type) {
  using Op = spec::Swish;
  const char* const op = Op::kName;
  SwishTensors call{};
  call.x = read_floats(api, context, op, Op::kX, float_type);
  call.count = count_of(op, call.x);
  call.y = make_output(api, context, op, Op::kY, float_type, call.x.dims);
  return call;
}

TransposeTensors read_transpose(const Api& api, OrtKernelContext* context, int float_type) {
  using Op = spec::Transpose;
  const char* const op = Op::kName;
  TransposeTensors call{};
  call.x = read_floats(api, context, op, Op::kX, float_type);
  expect_rank(op, call.x, 4);
  const std::vector<int64_t>& dims = call.x.dims;
  call.batch = dims[0];
  call.rows = dims[1];
  call.columns = dims[2];
  call.bytes = count_of(op, call.x) == 0 ? 0 : dims[3] * bytes_of(float_type);
  call.y = make_output(api, context, op, Op::kY, float_type, {dims[0], dims[2], dims[1], dims[3]});
  return call;
}

GatherTensors read_gather(const Api& api, OrtKernelContext* context, int float_type) {
  using Op = spec::Gather;
  const char* const op = Op::kName;
  GatherTensors call{};
  call.data = read_floats(api, context, op, Op::kData, float_type);
  call.indices = read_input(api, context, op, Op::kIndices);
  expect_rank(op, call.data, 2);
  expect_type(op, call.indices, kInt64);
  if (call.indices.dims.size() != 1) expect_rank(op, call.indices, 2);
  call.rows = call.data.dims[0];
  call.count = count_of(op, call.indices);
  expect_in_range(op, call.indices, -call.rows, call.rows, "data");
  std::vector<int64_t> shape = call.indices.dims;
  shape.push_back(call.data.dims[1]);
  const int64_t size = expect_fitting(op, "Y", shape, bytes_of(float_type));
  call.bytes = call.count == 0 ? 0 : size / call.count;
  call.y = make_output(api, context, op, Op::kY, float_type, shape);
  return call;
}

}  // namespace tq::ort
