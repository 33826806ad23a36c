// What has another shape than it ought to have is refused by the first call.
#include "ort/rotary_input.h"

#include <algorithm>
#include <cmath>

#include "core/attention_call.h"
#include "ort/codec_inputs.h"
#include "tq/codec_spec.h"

namespace tq::ort {
namespace {

constexpr float kMostRadians = 3.14159274f;  // the float next to pi

bool is_frequency(float x) { return std::fabs(x) <= kMostRadians; }

RotaryOffset offset_of(const Tensor& frequencies, const Tensor& offset) {
  return {frequencies.as<float>(), offset.as<float>(), offset.dims[0], offset.dims[1],
          static_cast<int>(offset.dims[2])};
}

bool is_rotary(const Tensor& frequencies, const Tensor& offset) {
  if (frequencies.type != kFloat || offset.type != kFloat || offset.dims.size() != 3) return false;
  const int64_t size = offset.dims[2];
  if (offset.dims[0] < 2 || offset.dims[0] > kMaxOffsets || size < 1 || size > spec::kMaxHeadSize)
    return false;
  if (frequencies.dims != std::vector<int64_t>{size}) return false;
  const float* const all = frequencies.as<float>();
  return std::all_of(all, all + size, is_frequency);
}

}  // namespace

bool expect_frequencies(const char* op, const Tensor& frequencies, const Tensor& offset,
                        int64_t heads, int size) {
  if (frequencies.type == 0) return false;
  expect_type(op, frequencies, kFloat);
  if (frequencies.dims == std::vector<int64_t>{1}) return false;
  expect_dims(op, frequencies, {size}, "the head size");
  const std::string where = std::string(op) + ": ";
  for (int j = 0; j < size; ++j) {
    const float frequency = frequencies.as<float>()[j];
    if (is_frequency(frequency)) continue;
    throw OpError(where + frequencies.name + " of coordinate " + std::to_string(j) + " is " +
                  std::to_string(frequency) + ", expected radians from -pi to pi");
  }
  if (offset.type == 0) {
    throw OpError(where + offset.name + " is missing, expected it with " + frequencies.name);
  }
  if (expect_offset(op, offset, heads, size) < 2) {
    throw OpError(where + offset.name + " has shape " + text(offset.dims) +
                  ", expected rows for the cosines and the sines of the frequencies");
  }
  return true;
}

ReadyRotaryOffset::ReadyRotaryOffset(const Api& api, const OrtKernelInfo* info,
                                     const spec::Input& frequencies_input,
                                     const spec::Input& offset_input) {
  const Tensor frequencies = read_constant(api, info, frequencies_input);
  const Tensor offset = read_constant(api, info, offset_input);
  if (!is_rotary(frequencies, offset)) return;
  constant_.emplace(offset_of(frequencies, offset));
  dims_ = offset.dims;
}

const RotaryOffset* ReadyRotaryOffset::get(const Tensor& frequencies, const Tensor& offset,
                                           std::optional<RotaryOffset>& storage) const {
  if (constant_.has_value() && dims_ == offset.dims) return &*constant_;
  storage.emplace(offset_of(frequencies, offset));
  return &*storage;
}

}  // namespace tq::ort
