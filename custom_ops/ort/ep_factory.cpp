#include "ort/ep_factory.h"

#include "ort/custom_op.h"
#include "ort/operator_domain.h"

namespace tq::ort {
namespace {

constexpr const char* kProvider = "TurboQuantExecutionProvider";

// Claims no node, so that ONNX Runtime asks it for nothing else.
struct Provider : OrtEp {
  Provider() : OrtEp{} {
    ort_version_supported = kEpApiVersion;
    GetName = [](const OrtEp*) { return kProvider; };
    GetCapability = [](OrtEp*, const OrtGraph*, OrtEpGraphSupportInfo*) -> OrtStatus* {
      return nullptr;
    };
    Compile = [](OrtEp*, const OrtGraph**, const OrtNode**, size_t, OrtNodeComputeInfo**,
                 OrtNode**) -> OrtStatus* { return nullptr; };
    ReleaseNodeComputeInfos = [](OrtEp*, OrtNodeComputeInfo**, size_t) {};
  }
};

struct Factory : OrtEpFactory {
  explicit Factory(const OrtApi* table) : OrtEpFactory{}, api(table), operators(api) {
    ort_version_supported = kEpApiVersion;
    GetName = [](const OrtEpFactory*) { return kProvider; };
    GetVendor = [](const OrtEpFactory*) { return "tq-onnx"; };
    GetVendorId = [](const OrtEpFactory*) { return uint32_t{0}; };
    GetVersion = [](const OrtEpFactory*) { return TQ_VERSION; };
    GetSupportedDevices = &Factory::find_device;
    CreateEp = [](OrtEpFactory* factory, const OrtHardwareDevice* const*,
                  const OrtKeyValuePairs* const*, size_t, const OrtSessionOptions*,
                  const OrtLogger*, OrtEp** provider) {
      return guard(self(factory).api, [&] { *provider = new Provider; });
    };
    ReleaseEp = [](OrtEpFactory*, OrtEp* provider) { delete static_cast<Provider*>(provider); };
    // Null stands for the memory of the CPU, which needs neither copies nor streams.
    CreateAllocator = [](OrtEpFactory*, const OrtMemoryInfo*, const OrtKeyValuePairs*,
                         OrtAllocator** allocator) -> OrtStatus* {
      *allocator = nullptr;
      return nullptr;
    };
    ReleaseAllocator = [](OrtEpFactory*, OrtAllocator*) {};
    CreateDataTransfer = [](OrtEpFactory*, OrtDataTransferImpl** transfer) -> OrtStatus* {
      *transfer = nullptr;
      return nullptr;
    };
    IsStreamAware = [](const OrtEpFactory*) { return false; };
    GetNumCustomOpDomains = [](OrtEpFactory*, size_t* count) -> OrtStatus* {
      *count = 1;
      return nullptr;
    };
    GetCustomOpDomains = [](OrtEpFactory* factory, OrtCustomOpDomain** domains,
                            size_t capacity) -> OrtStatus* {
      return guard(self(factory).api, [&] {
        if (capacity == 0) throw OpError("there is no room for the domain of tq_onnx_ops");
        domains[0] = self(factory).operators.get();
      });
    };
  }

  static Factory& self(OrtEpFactory* factory) { return *static_cast<Factory*>(factory); }

  // One CPU: each device of a session would bring the domain again.
  static OrtStatus* TQ_ORT_CALL find_device(OrtEpFactory* factory,
                                            const OrtHardwareDevice* const* devices, size_t count,
                                            OrtEpDevice** found, size_t capacity,
                                            size_t* num_found) {
    const Api& api = self(factory).api;
    return guard(api, [&] {
      *num_found = 0;
      for (size_t i = 0; i < count && *num_found < capacity; ++i) {
        if (api.hardware_device_type(devices[i]) != kCpuDevice) continue;
        check(api.create_ep_device(factory, devices[i], &found[0]));
        *num_found = 1;
        return;
      }
    });
  }

  const Api api;
  const OperatorDomain operators;
};

}  // namespace

OrtEpFactory* create_ep_factory(const OrtApi* table) { return new Factory(table); }

void release_ep_factory(OrtEpFactory* factory) { delete static_cast<Factory*>(factory); }

}  // namespace tq::ort
