// What the kernels of CANN take is less than the operators' contract; the rest is refused here, by
// value. The limits are those of cann/kernels/launch.h.
#pragma once

#include <cstdint>

#include "core/element.h"
#include "ort/tensor.h"
#include "tq/codec_spec.h"

namespace tq::cann {

inline constexpr const char* kProvider = "CANNExecutionProvider";

// ---- when a session is made
void expect_element(const char* op, int float_type);
void expect_codec(const char* op, const char* name, spec::Codec codec);
// Refuses the optional inputs, which are those from `first` on.
void expect_no_inputs(const ort::Api& api, const OrtKernelInfo* info, const char* op, size_t first,
                      std::initializer_list<const char*> names);

// ---- with each call
void expect_kernel_head_size(const char* op, const ort::Tensor& tensor);
void expect_exact_rows(const char* op, const ort::Tensor& cache, int head_size);

// Sizes as the kernels count them. Vectors are the [B, H, T] of `vectors`, which the grouped
// queries and the slots of a cache are counted by.
void expect_counted(const char* op, const ort::Tensor& vectors, int64_t slots);

}  // namespace tq::cann
