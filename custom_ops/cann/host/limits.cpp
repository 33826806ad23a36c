// Refusals of what is not compiled into the kernels; the contract is in limits.h.
#include "cann/host/limits.h"

#include <limits>

#include "ort/codec_inputs.h"

namespace tq::cann {
namespace {

using ort::OpError;

constexpr spec::Codec kCodec{spec::Kind::kLloydMax, 4};
constexpr int64_t kMost = std::numeric_limits<uint32_t>::max();

std::string on_cann(const char* op) { return std::string(op) + " on " + kProvider + ": "; }

}  // namespace

void expect_element(const char* op, int float_type) {
  if (float_type != ort::kFloat && float_type != ort::kFloat16) {
    throw OpError(on_cann(op) + "the model has type " + ort::type_name(float_type) +
                  ", expected float or float16");
  }
}

void expect_codec(const char* op, const char* name, spec::Codec codec) {
  if (codec.kind == kCodec.kind && codec.bits == kCodec.bits) return;
  throw OpError(on_cann(op) + name + " is " +
                spec::kKindNames[static_cast<int>(codec.kind)] + " with " +
                std::to_string(codec.bits) + " bits, expected lloyd_max with 4 bits");
}

void expect_no_inputs(const ort::Api& api, const OrtKernelInfo* info, const char* op, size_t first,
                      std::initializer_list<const char*> names) {
  size_t count = 0;
  ort::check(api.kernel_info_input_count(info, &count));
  size_t index = first;
  for (const char* const name : names) {
    size_t size = 0;  // with the terminator
    if (index < count) ort::check(api.kernel_info_input_name(info, index, nullptr, &size));
    if (size > 1) throw OpError(on_cann(op) + "input " + name + " is given, expected none");
    ++index;
  }
}

void expect_kernel_head_size(const char* op, const ort::Tensor& tensor) {
  const int64_t size = tensor.dims[3];
  if (size != 64 && size != 128) {
    throw OpError(on_cann(op) + tensor.name + " has head size " + std::to_string(size) +
                  ", expected 64 or 128");
  }
}

void expect_exact_rows(const char* op, const ort::Tensor& cache, int head_size) {
  const int64_t width = cache.dims[3], used = spec::row_bytes(kCodec, head_size);
  if (width != used) {
    throw OpError(on_cann(op) + cache.name + " has row width " + std::to_string(width) +
                  ", expected the " + std::to_string(used) + " bytes of " +
                  ort::rows_of(kCodec, head_size));
  }
}

void expect_counted(const char* op, const ort::Tensor& vectors, int64_t slots) {
  const std::vector<int64_t> counted(vectors.dims.begin(), vectors.dims.end() - 1);
  const int64_t count = ort::expect_fitting(op, vectors.name, counted, 1);
  if (count > kMost || slots > kMost) {
    throw OpError(on_cann(op) + vectors.name + " of shape " + ort::text(vectors.dims) + " and " +
                  std::to_string(slots) + " slots, expected at most " + std::to_string(kMost) +
                  " vectors and slots");
  }
}

}  // namespace tq::cann
