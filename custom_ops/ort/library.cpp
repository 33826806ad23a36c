// The symbols of the library.
#include <cstdlib>
#include <string>

#include "core/attention_prefill.h"
#include "core/dispatch.h"
#include "core/lane_sums.h"
#include "core/processor.h"
#include "ort/custom_op.h"
#include "ort/ep_factory.h"
#include "ort/operator_domain.h"
#include "tq/codec_spec.h"

#if defined(_WIN32)
#define TQ_EXPORT extern "C" __declspec(dllexport)
#else
#define TQ_EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace tq::ort {
namespace {

// ONNX Runtime keeps pointers to the operators and to the domain as long as any session lives, so they
// live as long as the process.
OrtCustomOpDomain* operators(const Api& api) {
  static const OperatorDomain* const domain = new OperatorDomain(api);
  return domain->get();
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
         ", \"isa_of_processor\": " + quoted(levels_of_processor().front()) +
         ", \"isa\": " + (chosen ? quoted(chosen->name) : "null") + ", \"products\": " + products +
         ", \"roundings\": " + (chosen ? roundings(*chosen) : "{}") +
         ", \"decode_rows\": " + std::to_string(kDecodeRows) + "}";
}

}  // namespace
}  // namespace tq::ort

namespace {

// The table of that version, or null and the status that says what is missing.
const OrtApi* table_of(const OrtApiBase* base, uint32_t version, const char* lacking,
                       OrtStatus*& status) {
  const OrtApi* const table = base->GetApi(version);
  if (table == nullptr) {
    status = tq::ort::Api(base->GetApi(1)).create_status(tq::ort::kFail, lacking);
  }
  return table;
}

}  // namespace

TQ_EXPORT OrtStatus* TQ_ORT_CALL RegisterCustomOps(OrtSessionOptions* options,
                                                   const OrtApiBase* base) {
  OrtStatus* status = nullptr;
  const OrtApi* const table =
      table_of(base, tq::ort::kApiVersion,
               "tq_onnx_ops needs ONNX Runtime 1.18 or newer; update onnxruntime", status);
  if (table == nullptr) return status;
  const tq::ort::Api api(table);
  return tq::ort::guard(
      api, [&] { tq::ort::check(api.add_custom_op_domain(options, tq::ort::operators(api))); });
}

// What ONNX Runtime calls for `register_execution_provider_library`; see ort/ep_factory.h.
TQ_EXPORT OrtStatus* CreateEpFactories(const char*, const OrtApiBase* base, const OrtLogger*,
                                       OrtEpFactory** factories, size_t capacity, size_t* count) {
  OrtStatus* status = nullptr;
  const OrtApi* const table = table_of(
      base, tq::ort::kEpApiVersion,
      "tq_onnx_ops as an execution provider needs ONNX Runtime 1.24 or newer; update onnxruntime, "
      "or register its custom operators",
      status);
  if (table == nullptr) return status;
  const tq::ort::Api api(table);
  return tq::ort::guard(api, [&] {
    *count = 0;
    if (capacity == 0) throw tq::ort::OpError("there is no room for a factory of tq_onnx_ops");
    factories[0] = tq::ort::create_ep_factory(table);
    *count = 1;
  });
}

TQ_EXPORT OrtStatus* ReleaseEpFactory(OrtEpFactory* factory) {
  tq::ort::release_ep_factory(factory);
  return nullptr;
}

// Sixteen hexadecimal digits that identify the row layout (see tq_onnx/codec/spec.py).
TQ_EXPORT const char* tq_layout_digest() { return tq::spec::kLayoutDigest; }

// JSON: {"version", "isa_compiled", "isa_supported", "isa_of_processor", "isa", "products", "roundings",
// "decode_rows"}. "isa_of_processor" is the best level that it has, whether in this library or not.
// "isa" and "products" are null when the environment forces a level that does not run here.
TQ_EXPORT const char* tq_library_info() {
  thread_local std::string info;  // anew at each call, as the environment may be another
  info = tq::ort::describe();
  return info.c_str();
}
