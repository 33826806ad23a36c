// The three symbols of the library.
#include <cstdlib>
#include <mutex>
#include <string>

#if defined(TQ_CANN)
#include "cann/host/decoder.h"
#include "cann/host/launch.h"
#include "cann/host/operators.h"
#endif
#include "core/attention_prefill.h"
#include "core/dispatch.h"
#include "core/lane_sums.h"
#include "ort/attention_op.h"
#include "ort/custom_op.h"
#include "ort/decoder_ops.h"
#include "ort/encode_op.h"
#include "tq/codec_spec.h"
#include "tq/operators.h"

#if defined(_WIN32)
#define TQ_EXPORT extern "C" __declspec(dllexport)
#else
#define TQ_EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace tq::ort {
namespace {

template <class Kernel>
void declare(const Api& api, OrtCustomOpDomain* domain, const std::vector<int>& float_types) {
  // ONNX Runtime keeps pointers to the operators and to the domain as long as any session lives, so
  // they live as long as the process.
  for (const int type : float_types) {
    check(api.custom_op_domain_add(domain, new CustomOp<Kernel>(type)));
  }
}

OrtCustomOpDomain* operators(const Api& api) {
  static std::mutex mutex;
  static OrtCustomOpDomain* domain = nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  if (domain == nullptr) {
    OrtCustomOpDomain* created = nullptr;
    check(api.create_custom_op_domain(spec::kDomain, &created));
    const std::vector<int> types{kFloat, kFloat16, kBfloat16};
    declare<EncodeKernel>(api, created, types);
    declare<AttentionKernel>(api, created, types);
    declare<PagedEncodeKernel>(api, created, types);
    declare<PagedAttentionKernel>(api, created, types);
    declare<RmsNormalizationKernel>(api, created, types);
    declare<RotaryEmbeddingKernel>(api, created, types);
    declare<SwishKernel>(api, created, types);
    declare<TransposeKernel>(api, created, types);
    declare<GatherKernel>(api, created, types);
#if defined(TQ_CANN)
    // Of the same names, for another provider: a session without it does not look at them.
    declare<cann::DrainOnError<cann::EncodeKernel>>(api, created, types);
    declare<cann::DrainOnError<cann::AttentionKernel>>(api, created, types);
    declare<cann::DrainOnError<cann::RmsNormalizationKernel>>(api, created, types);
    declare<cann::DrainOnError<cann::RotaryEmbeddingKernel>>(api, created, types);
    declare<cann::DrainOnError<cann::SwishKernel>>(api, created, types);
    declare<cann::DrainOnError<cann::TransposeKernel>>(api, created, types);
    declare<cann::DrainOnError<cann::GatherKernel>>(api, created, types);
#endif
    domain = created;
  }
  return domain;
}

std::string names(const std::vector<const Kernels*>& levels) {
  std::string out = "[";
  for (const Kernels* level : levels) {
    out += std::string(out.size() > 1 ? ", " : "") + "\"" + level->name + "\"";
  }
  return out + "]";
}

std::string quoted(const char* text) { return "\"" + std::string(text) + "\""; }

std::string rounding(const char* name, float query_steps, float weight_steps, int weight_rows,
                     int lane_limit) {
  return quoted(name) + ": [" + std::to_string(static_cast<int>(query_steps)) + ", " +
         std::to_string(static_cast<int>(weight_steps)) + ", " + std::to_string(weight_rows) +
         ", " + std::to_string(lane_limit) + "]";
}

// How a level rounds what it multiplies with codes: steps of the largest query coordinate, steps of
// the largest weight, rows whose weights share these, and what a lane may add, 0 for lanes of 32 bits
// (core/lane_sums.h). "8" are decode steps, "pairs" are prompts of
// lloyd_max.
std::string roundings(const Kernels& level) {
  std::string out, reason;
  const IntegerKernels* const integers = with_products(level, "8", reason)->integers;
  if (integers != nullptr) {
    const int step_rows = integers->has_lanes ? kLaneStepRows : kByteStepRows;
    const int lane_limit = integers->has_lanes ? kMostInLane : 0;
    out = rounding("8", kLargestByte, kLargestByteWeight, step_rows, lane_limit);
  }
  if (level.multiply_pairs != nullptr) {
    out += ", " + rounding("pairs", kLargestPairNumber, kLargestPairNumber, kPrefillBlock, 0);
  }
  return "{" + out + "}";
}

std::string describe() {
  std::string reason;
  const Kernels* const chosen = find_kernels(std::getenv(kIsaVariable), reason);
  std::string products = "null";
  if (chosen != nullptr) products = quoted(chosen->integers != nullptr ? "8" : "float");
  return "{\"version\": " + quoted(TQ_VERSION) +
         ", \"isa_compiled\": " + names(compiled_kernels()) +
         ", \"isa_supported\": " + names(supported_kernels()) +
         ", \"isa\": " + (chosen ? quoted(chosen->name) : "null") + ", \"products\": " + products +
         ", \"roundings\": " + (chosen ? roundings(*chosen) : "{}") +
         ", \"decode_rows\": " + std::to_string(kDecodeRows) + "}";
}

}  // namespace
}  // namespace tq::ort

TQ_EXPORT OrtStatus* TQ_ORT_CALL RegisterCustomOps(OrtSessionOptions* options,
                                                   const OrtApiBase* base) {
  const OrtApi* const table = base->GetApi(tq::ort::kApiVersion);
  if (table == nullptr) {
    const tq::ort::Api oldest(base->GetApi(1));
    return oldest.create_status(tq::ort::kFail,
                                "tq_onnx_ops needs ONNX Runtime 1.18 or newer; update onnxruntime");
  }
  const tq::ort::Api api(table);
  return tq::ort::guard(
      api, [&] { tq::ort::check(api.add_custom_op_domain(options, tq::ort::operators(api))); });
}

// Sixteen hexadecimal digits that identify the row layout (see tq_onnx/codec/spec.py).
TQ_EXPORT const char* tq_layout_digest() { return tq::spec::kLayoutDigest; }

// JSON: {"version", "isa_compiled", "isa_supported", "isa", "products", "roundings", "decode_rows"};
// "isa" and "products" are null when the environment forces a level that this machine does not
// have.
TQ_EXPORT const char* tq_library_info() {
  thread_local std::string info;  // anew at each call, as the environment may be another
  info = tq::ort::describe();
  return info.c_str();
}
