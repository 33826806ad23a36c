// From a C++ kernel class to an OrtCustomOp; exceptions end here.
//
// A kernel class provides: `Kernel(const Api&, const OrtKernelInfo*, Element)`,
// `compute(OrtKernelContext*)` and a static `Signature signature(int float_type)`.
#pragma once

#include <cstdlib>
#include <exception>
#include <vector>

#include "core/dispatch.h"
#include "core/element.h"
#include "core/parallel.h"
#include "ort/ort_abi.h"
#include "ort/tensor.h"
#include "tq/operators.h"

namespace tq::ort {

struct Port {
  int type;
  int characteristic;
  int memory = kDefaultMemory;  // of the provider; looked at for inputs
};

struct Signature {
  const char* name;
  std::vector<Port> inputs;
  std::vector<Port> outputs;
  const char* provider = "CPUExecutionProvider";
};

inline int type_of(spec::Elements elements, int float_type) {
  switch (elements) {
    case spec::Elements::kFloat32:
      return kFloat;
    case spec::Elements::kInt64:
      return kInt64;
    case spec::Elements::kInt32:
      return kInt32;
    case spec::Elements::kUint8:
      return kUint8;
    default:
      return float_type;
  }
}

// The signature of an operator of tq/operators.h, for models with elements of one type.
template <class Operator>
Signature signature_of(int float_type) {
  Signature signature{Operator::kName, {}, {}};
  for (const spec::Input& input : Operator::kInputs) {
    signature.inputs.push_back(
        {type_of(input.elements, float_type), input.is_optional ? kOptional : kRequired});
  }
  for (const spec::Output& output : Operator::kOutputs) {
    signature.outputs.push_back({type_of(output.elements, float_type), kRequired});
  }
  return signature;
}

inline Element element_of(int float_type) {
  return float_type == kFloat ? Element::kFloat
                              : (float_type == kFloat16 ? Element::kHalf : Element::kBfloat);
}

inline int type_of(Element element) {
  return element == Element::kFloat ? kFloat : (element == Element::kHalf ? kFloat16 : kBfloat16);
}

// The level to use, forced by the environment or the best there is, and its products.
inline const Kernels& choose_kernels(const char* op) {
  std::string reason;
  const Kernels* kernels = find_kernels(std::getenv(kIsaVariable), reason);
  if (kernels != nullptr) {
    kernels = with_products(*kernels, std::getenv(kProductsVariable), reason);
  }
  if (kernels == nullptr) throw OpError(std::string(op) + ": " + reason);
  return *kernels;
}

// ONNX Runtime's own threads. A failure to start a region is kept and thrown at the end.
class Pool {
 public:
  Pool(const Api& api, OrtKernelContext* context) : api_(api), context_(context) {}

  Parallel parallel() { return {&Pool::run, this}; }
  void finish() { check(status_); }

 private:
  static void run(void* self, void (*task)(void*, std::size_t), std::size_t count, void* argument) {
    Pool& pool = *static_cast<Pool*>(self);
    if (pool.status_ == nullptr) {
      pool.status_ = pool.api_.context_parallel_for(pool.context_, task, count, 0, argument);
    }
  }

  const Api& api_;
  OrtKernelContext* context_;
  OrtStatus* status_ = nullptr;
};

template <class Body>
OrtStatus* guard(const Api& api, Body&& body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const RuntimeStatus& error) {
    return error.status();
  } catch (const OpError& error) {
    return api.create_status(kInvalidArgument, error.what());
  } catch (const std::exception& error) {
    return api.create_status(kFail, error.what());
  } catch (...) {
    return api.create_status(kFail, "unknown error");
  }
}

template <class Kernel>
class CustomOp : public OrtCustomOp {
 public:
  explicit CustomOp(int float_type)
      : OrtCustomOp{}, float_type_(float_type), signature_(Kernel::signature(float_type)) {
    version = kApiVersion;
    GetName = [](const OrtCustomOp* op) { return self(op).signature_.name; };
    GetExecutionProviderType = [](const OrtCustomOp* op) { return self(op).signature_.provider; };
    GetInputTypeCount = [](const OrtCustomOp* op) { return self(op).signature_.inputs.size(); };
    GetInputType = [](const OrtCustomOp* op, size_t i) {
      return self(op).signature_.inputs[i].type;
    };
    GetInputCharacteristic = [](const OrtCustomOp* op, size_t i) {
      return self(op).signature_.inputs[i].characteristic;
    };
    GetOutputTypeCount = [](const OrtCustomOp* op) { return self(op).signature_.outputs.size(); };
    GetOutputType = [](const OrtCustomOp* op, size_t i) {
      return self(op).signature_.outputs[i].type;
    };
    GetOutputCharacteristic = [](const OrtCustomOp* op, size_t i) {
      return self(op).signature_.outputs[i].characteristic;
    };
    GetInputMemoryType = [](const OrtCustomOp* op, size_t i) {
      return self(op).signature_.inputs[i].memory;
    };
    GetVariadicInputMinArity = [](const OrtCustomOp*) { return 1; };
    GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 1; };
    GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
    GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 1; };
    GetStartVersion = [](const OrtCustomOp*) { return 1; };
    GetEndVersion = [](const OrtCustomOp*) { return 0x7fffffff; };
    CreateKernelV2 = [](const OrtCustomOp* op, const OrtApi* table, const OrtKernelInfo* info,
                        void** kernel) -> OrtStatus* {
      const Api api(table);
      return guard(api, [&] { *kernel = new Kernel(api, info, element_of(self(op).float_type_)); });
    };
    KernelComputeV2 = [](void* kernel, OrtKernelContext* context) -> OrtStatus* {
      Kernel& typed = *static_cast<Kernel*>(kernel);
      return guard(typed.api(), [&] { typed.compute(context); });
    };
    KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  }

 private:
  static const CustomOp& self(const OrtCustomOp* op) { return *static_cast<const CustomOp*>(op); }

  int float_type_;
  Signature signature_;
};

}  // namespace tq::ort
