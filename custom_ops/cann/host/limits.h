// The CANN kernels support a part of the operators' contract. Here the rest is refused by value, with
// the limits of cann/kernels/tiling.h and device_features.h.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "core/window.h"
#include "ort/custom_op.h"
#include "ort/tensor.h"
#include "tq/codec_spec.h"
#include "tq/operators.h"

namespace tq::cann {

inline constexpr const char* kProvider = "CANNExecutionProvider";

// Of whatever the kernels count, in 32 bits.
inline constexpr int64_t kMostCounted = UINT32_MAX;

// An error: "<op> on CANNExecutionProvider: <found>, expected <expected>".
[[noreturn]] void refuse(const char* op, const std::string& found, const std::string& expected);

// ---- when a session is made
// An operator of the CPU declared for this provider. Inputs that the host reads stay there: every
// value is checked before anything is enqueued.
ort::Signature on_device(ort::Signature signature,
                         std::initializer_list<spec::Input> host_inputs = {});

void expect_element(const char* op, int float_type);
// Refuses a codec that our kernels do not have, in rows or in planes.
void expect_codec(const char* op, const char* name, spec::Codec codec, const Window& window);
void expect_softcap(const char* op, float softcap);
void expect_overlay(const char* op, const Window& window);
void expect_known_input(const ort::Api& api, const OrtKernelInfo* info, const char* op,
                        const spec::Input& input);

// Refuses the optional inputs of an operator of tq/operators.h that the kernels do not take.
template <class Operator>
void expect_known_inputs(const ort::Api& api, const OrtKernelInfo* info) {
  for (const spec::Input& input : Operator::kInputs) {
    if (input.is_optional) expect_known_input(api, info, Operator::kName, input);
  }
}

// ---- with each call
void expect_kernel_head_size(const char* op, const ort::Tensor& tensor);
void expect_exact_rows(const char* op, const ort::Tensor& cache, spec::Codec codec,
                       int head_size, const char* soc);

// Refuses sizes whose products do not fit in the 32 bits that kernels count in: the vectors [B, H, T]
// of `vectors`, and the slots of all caches.
void expect_counted(const char* op, const ort::Tensor& vectors, int64_t slots);

// Refuses more elements than 32 bits can count.
void expect_elements(const char* op, const ort::Tensor& tensor);
// The address of a tensor, which must be a multiple of 32 bytes.
uint64_t aligned(const char* op, const ort::Tensor& tensor);

}  // namespace tq::cann
