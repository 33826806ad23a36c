// Refusals of what is not compiled into the kernels; the contract is in limits.h.
#include "cann/host/limits.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "cann/host/device_features.h"
#include "ort/codec_inputs.h"

namespace tq::cann {
namespace {

constexpr uintptr_t kAlignment = 32;

}  // namespace

void refuse(const char* op, const std::string& found, const std::string& expected) {
  throw ort::OpError(std::string(op) + " on " + kProvider + ": " + found + ", expected " +
                     expected);
}

ort::Signature on_device(ort::Signature signature,
                         std::initializer_list<spec::Input> host_inputs) {
  for (const spec::Input& input : host_inputs) {
    signature.inputs[input.slot].memory = ort::kCpuInput;
  }
  signature.provider = kProvider;
  return signature;
}

void expect_element(const char* op, int float_type) {
  if (float_type == ort::kFloat || float_type == ort::kFloat16) return;
  refuse(op, std::string("the model has type ") + ort::type_name(float_type),
         features::kElements);
}

void expect_codec(const char* op, const char* name, spec::Codec codec, const Window& window) {
  const auto is_codec = [&](const spec::Codec& known) {
    return codec.kind == known.kind && codec.bits == known.bits;
  };
  const bool is_apart = std::any_of(std::begin(features::kInPlanes), std::end(features::kInPlanes), is_codec);
  if (window.has_planes ? is_apart
                        : std::any_of(std::begin(features::kCodecs), std::end(features::kCodecs), is_codec)) {
    return;
  }
  refuse(op,
         std::string(name) + " is " + spec::kKindNames[static_cast<int>(codec.kind)] + " with " +
             std::to_string(codec.bits) + " bits" + (window.has_planes ? " in planes" : ""),
         window.has_planes ? features::kPlanes : features::kCodec);
}

void expect_softcap(const char* op, float softcap) {
  if (softcap == 0.0f) return;
  if (softcap >= features::kLeastSoftcap && softcap <= features::kMostSoftcap) return;
  refuse(op, "softcap is " + std::to_string(softcap), features::kSoftcap);
}

void expect_overlay(const char* op, const Window& window) {
  if (!window.takes_spare_rows()) return;
  refuse(op, "overlay_rows is 0 and there are exact tokens", "rows in front of those of the tokens");
}

void expect_known_input(const ort::Api& api, const OrtKernelInfo* info, const char* op,
                     const spec::Input& input) {
  size_t count = 0, size = 0;  // of the inputs, and of the name with its terminator
  ort::check(api.kernel_info_input_count(info, &count));
  if (input.slot < count) {
    ort::check(api.kernel_info_input_name(info, input.slot, nullptr, &size));
  }
  if (size <= 1) return;
  for (const char* const known : features::kInputs) {
    if (std::strcmp(input.name, known) == 0) return;
  }
  refuse(op, std::string("input ") + input.name + " is given", "none");
}

void expect_kernel_head_size(const char* op, const ort::Tensor& tensor) {
  const int64_t size = tensor.dims[3];
  for (const int64_t known : features::kHeadSizes) {
    if (size == known) return;
  }
  refuse(op, std::string(tensor.name) + " has head size " + std::to_string(size),
         features::kHeadSize);
}

void expect_exact_rows(const char* op, const ort::Tensor& cache, spec::Codec codec,
                       int head_size, const char* soc) {
  const int64_t width = cache.dims[3], used = spec::row_bytes(codec, head_size);
  if (width != used) {
    refuse(op, std::string(cache.name) + " has row width " + std::to_string(width),
           "the " + std::to_string(used) + " bytes of " + ort::rows_of(codec, head_size));
  }
  for (const features::LeastRow& least : features::kLeastRows) {
    if (std::strcmp(least.begins, soc) != 0 || used >= least.bytes) continue;
    refuse(op,
           std::string(cache.name) + " has rows of " + std::to_string(used) + " bytes (" +
               ort::rows_of(codec, head_size) + "), which " + soc + " cannot move",
           "at least " + std::to_string(least.bytes));
  }
}

void expect_counted(const char* op, const ort::Tensor& vectors, int64_t slots) {
  const std::vector<int64_t> counted(vectors.dims.begin(), vectors.dims.end() - 1);
  const int64_t count = ort::expect_fitting(op, vectors.name, counted, 1);
  if (count <= kMostCounted && slots <= kMostCounted) return;
  refuse(op,
         std::string(vectors.name) + " of shape " + ort::text(vectors.dims) + " and " +
             std::to_string(slots) + " slots",
         "at most " + std::to_string(kMostCounted) + " vectors and slots");
}

void expect_elements(const char* op, const ort::Tensor& tensor) {
  if (ort::expect_fitting(op, tensor.name, tensor.dims, 1) <= kMostCounted) return;
  refuse(op, std::string(tensor.name) + " has shape " + ort::text(tensor.dims),
         "at most " + std::to_string(kMostCounted) + " elements");
}

uint64_t aligned(const char* op, const ort::Tensor& tensor) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(tensor.data);
  if (address % kAlignment == 0) return address;
  refuse(op,
         std::string(tensor.name) + " begins " + std::to_string(address % kAlignment) +
             " bytes behind a multiple of " + std::to_string(kAlignment),
         "an address that is one");
}

}  // namespace tq::cann
