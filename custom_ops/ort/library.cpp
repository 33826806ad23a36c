// The three symbols of the library.
#include <cstdlib>
#include <mutex>
#include <string>

#include "core/dispatch.h"
#include "ort/attention_op.h"
#include "ort/custom_op.h"
#include "ort/encode_op.h"
#include "tq/codec_spec.h"

#if defined(_WIN32)
#define TQ_EXPORT extern "C" __declspec(dllexport)
#else
#define TQ_EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace tq::ort {
namespace {

// ONNX Runtime keeps pointers to the operators and to the domain as long as any session lives, so
// they live as long as the process.
OrtCustomOpDomain* operators(const Api& api) {
  static std::mutex mutex;
  static OrtCustomOpDomain* domain = nullptr;
  static CustomOp<EncodeKernel> encode[] = {CustomOp<EncodeKernel>(kFloat),
                                            CustomOp<EncodeKernel>(kFloat16),
                                            CustomOp<EncodeKernel>(kBfloat16)};
  static CustomOp<AttentionKernel> attend[] = {CustomOp<AttentionKernel>(kFloat),
                                               CustomOp<AttentionKernel>(kFloat16),
                                               CustomOp<AttentionKernel>(kBfloat16)};
  const std::lock_guard<std::mutex> lock(mutex);
  if (domain == nullptr) {
    OrtCustomOpDomain* created = nullptr;
    check(api.create_custom_op_domain(spec::kDomain, &created));
    for (const OrtCustomOp& op : encode) check(api.custom_op_domain_add(created, &op));
    for (const OrtCustomOp& op : attend) check(api.custom_op_domain_add(created, &op));
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

std::string describe() {
  std::string reason;
  const Kernels* const chosen = find_kernels(std::getenv(kIsaVariable), reason);
  return std::string("{\"version\": \"") + TQ_VERSION + "\", \"isa_compiled\": " +
         names(compiled_kernels()) + ", \"isa_supported\": " + names(supported_kernels()) +
         ", \"isa\": " + (chosen ? "\"" + std::string(chosen->name) + "\"" : "null") + "}";
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
  return tq::ort::guard(api, [&] {
    tq::ort::check(api.add_custom_op_domain(options, tq::ort::operators(api)));
  });
}

// Sixteen hexadecimal digits that identify the row layout (see tq_onnx/codec/spec.py).
TQ_EXPORT const char* tq_layout_digest() { return tq::spec::kLayoutDigest; }

// JSON: {"version", "isa_compiled", "isa_supported", "isa"}; "isa" is null when the environment
// forces a level that this machine does not have.
TQ_EXPORT const char* tq_library_info() {
  static const std::string info = tq::ort::describe();
  return info.c_str();
}
