// Types, ranks and dimensions are compared before any data is read; the contract is in tensor.h.
#include "ort/tensor.h"

#include <limits>

#include "tq/codec_spec.h"

namespace tq::ort {
namespace {

[[noreturn]] void missing(const Api& api, OrtStatus* status, const char* op, const char* name) {
  api.release_status(status);
  throw OpError(std::string(op) + ": attribute " + name + " is missing or of another type");
}

}  // namespace

const char* type_name(int type) {
  switch (type) {
    case kFloat:
      return "float";
    case kUint8:
      return "uint8";
    case kInt32:
      return "int32";
    case kInt64:
      return "int64";
    case kFloat16:
      return "float16";
    case kBfloat16:
      return "bfloat16";
    default:
      return "another type";
  }
}

std::string text(const std::vector<int64_t>& dims) {
  std::string out = "[";
  for (size_t i = 0; i < dims.size(); ++i) out += (i ? ", " : "") + std::to_string(dims[i]);
  return out + "]";
}

Tensor read_tensor(const Api& api, const OrtValue* value, const char* name) {
  Tensor tensor{name, 0, {}, nullptr};
  struct Info {
    const Api& api;
    OrtTensorTypeAndShapeInfo* info = nullptr;
    ~Info() {
      if (info != nullptr) api.release_tensor_type_and_shape(info);
    }
  } holder{api};
  check(api.get_tensor_type_and_shape(value, &holder.info));
  check(api.get_tensor_element_type(holder.info, &tensor.type));
  size_t rank = 0;
  check(api.get_dimensions_count(holder.info, &rank));
  tensor.dims.resize(rank);
  check(api.get_dimensions(holder.info, tensor.dims.data(), rank));
  check(api.get_tensor_mutable_data(const_cast<OrtValue*>(value), &tensor.data));
  return tensor;
}

Tensor read_optional(const Api& api, const OrtKernelContext* context, const spec::Input& input) {
  size_t count = 0;
  check(api.context_input_count(context, &count));
  const OrtValue* value = nullptr;
  if (input.slot < count) check(api.context_input(context, input.slot, &value));
  if (value == nullptr) return {input.name, 0, {}, nullptr};
  return read_tensor(api, value, input.name);
}

Tensor read_constant(const Api& api, const OrtKernelInfo* info, const spec::Input& input) {
  int is_constant = 0;
  const OrtValue* value = nullptr;
  check(api.kernel_info_constant_input(info, input.slot, &is_constant, &value));
  if (is_constant == 0 || value == nullptr) return {input.name, 0, {}, nullptr};
  return read_tensor(api, value, input.name);
}

Tensor read_input(const Api& api, const OrtKernelContext* context, const char* op,
                  const spec::Input& input) {
  const OrtValue* value = nullptr;
  check(api.context_input(context, input.slot, &value));
  if (value == nullptr) throw OpError(std::string(op) + ": input " + input.name + " is missing");
  return read_tensor(api, value, input.name);
}

Tensor make_output(const Api& api, OrtKernelContext* context, const char* op,
                   const spec::Output& output, int type, const std::vector<int64_t>& dims) {
  OrtValue* value = nullptr;
  check(api.context_output(context, output.slot, dims.data(), dims.size(), &value));
  if (value == nullptr) throw OpError(std::string(op) + ": output " + output.name + " is missing");
  const Tensor tensor = read_tensor(api, value, output.name);
  expect_type(op, tensor, type);
  expect_dims(op, tensor, dims, "these inputs");
  return tensor;
}

void expect_type(const char* op, const Tensor& tensor, int type) {
  if (tensor.type != type) {
    throw OpError(std::string(op) + ": " + tensor.name + " has type " + type_name(tensor.type) +
                  ", expected " + type_name(type));
  }
}

void expect_rank(const char* op, const Tensor& tensor, size_t rank) {
  if (tensor.dims.size() != rank) {
    throw OpError(std::string(op) + ": " + tensor.name + " has shape " + text(tensor.dims) +
                  ", expected " + std::to_string(rank) + " dimensions");
  }
}

void expect_dims(const char* op, const Tensor& tensor, const std::vector<int64_t>& dims,
                 const char* why) {
  if (tensor.dims != dims) {
    throw OpError(std::string(op) + ": " + tensor.name + " has shape " + text(tensor.dims) +
                  ", expected " + text(dims) + " for " + why);
  }
}

int expect_head_size(const char* op, const Tensor& tensor) {
  const int64_t size = tensor.dims[3];
  if (size < 0 || size > spec::kMaxHeadSize || !spec::is_head_size(static_cast<int>(size))) {
    throw OpError(std::string(op) + ": " + tensor.name + " has head size " + std::to_string(size) +
                  ", expected a multiple of " + std::to_string(spec::kHeadSizeMultiple) +
                  " up to " + std::to_string(spec::kMaxHeadSize));
  }
  return static_cast<int>(size);
}

int64_t expect_fitting(const char* op, const char* name, const std::vector<int64_t>& dims,
                       int64_t bytes) {
  int64_t product = bytes;
  bool fits = true;
  for (const int64_t dim : dims) {
    if (dim == 0) return 0;
    fits = fits && product <= std::numeric_limits<int64_t>::max() / dim;
    if (fits) product *= dim;
  }
  if (!fits) {
    throw OpError(std::string(op) + ": " + name + " of shape " + text(dims) +
                  " has more bytes than can be addressed");
  }
  return product;
}

void expect_apart(const char* op, const Tensor& past, const Tensor& present) {
  const int64_t past_bytes = expect_fitting(op, past.name, past.dims, 1);
  const int64_t present_bytes = expect_fitting(op, present.name, present.dims, 1);
  if (past_bytes == 0 || present_bytes == 0) return;
  const uintptr_t from = reinterpret_cast<uintptr_t>(past.data);
  const uintptr_t to = reinterpret_cast<uintptr_t>(present.data);
  if (from == to && past.dims == present.dims) return;
  const bool apart = from < to ? to - from >= static_cast<uintptr_t>(past_bytes)
                               : from - to >= static_cast<uintptr_t>(present_bytes);
  if (!apart) {
    throw OpError(std::string(op) + ": present of shape " + text(present.dims) +
                  " overlaps past of shape " + text(past.dims) +
                  ", expected one buffer of one shape or two separate ones");
  }
}

int64_t check_lengths(const char* op, const Tensor& lengths, int64_t batch, int64_t slots,
                      const char* slots_of) {
  expect_type(op, lengths, kInt64);
  expect_rank(op, lengths, 1);
  const int64_t count = lengths.dims[0];
  if (count != 1 && count != batch) {
    throw OpError(std::string(op) + ": " + lengths.name + " has " + std::to_string(count) +
                  " elements, expected 1 or " + std::to_string(batch) + ", the batch size");
  }
  int64_t longest = 0;
  for (int64_t b = 0; b < count; ++b) {
    const int64_t length = lengths.as<int64_t>()[b];
    if (length < 0 || length > slots) {
      const std::string item = std::string(op) + ": " + lengths.name + "[" + std::to_string(b) +
                               "] is " + std::to_string(length);
      if (length < 0) throw OpError(item + ", expected 0 or more");
      throw OpError(item + ", but " + slots_of + " has only " + std::to_string(slots) + " slots");
    }
    if (length > longest) longest = length;
  }
  return longest;
}

int64_t read_int(const Api& api, const OrtKernelInfo* info, const char* op, const char* name) {
  int64_t value = 0;
  if (OrtStatus* status = api.kernel_info_int64(info, name, &value)) missing(api, status, op, name);
  return value;
}

int64_t read_int_or(const Api& api, const OrtKernelInfo* info, const char* name,
                    int64_t otherwise) {
  int64_t value = 0;
  OrtStatus* const status = api.kernel_info_int64(info, name, &value);
  if (status == nullptr) return value;
  api.release_status(status);
  return otherwise;
}

std::vector<int64_t> read_ints(const Api& api, const OrtKernelInfo* info, const char* op,
                               const char* name) {
  size_t size = 0;
  if (OrtStatus* status = api.kernel_info_int64s(info, name, nullptr, &size)) {
    missing(api, status, op, name);
  }
  std::vector<int64_t> values(size);
  if (size == 0) return values;
  if (OrtStatus* status = api.kernel_info_int64s(info, name, values.data(), &size)) {
    missing(api, status, op, name);
  }
  return values;
}

float read_float(const Api& api, const OrtKernelInfo* info, const char* op, const char* name) {
  float value = 0.0f;
  if (OrtStatus* status = api.kernel_info_float(info, name, &value)) missing(api, status, op, name);
  return value;
}

std::string read_string(const Api& api, const OrtKernelInfo* info, const char* op,
                        const char* name) {
  size_t size = 0;
  if (OrtStatus* status = api.kernel_info_string(info, name, nullptr, &size)) {
    missing(api, status, op, name);
  }
  std::string value(size, '\0');
  if (OrtStatus* status = api.kernel_info_string(info, name, value.data(), &size)) {
    missing(api, status, op, name);
  }
  while (!value.empty() && value.back() == '\0') value.pop_back();
  return value;
}

}  // namespace tq::ort
