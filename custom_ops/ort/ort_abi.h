// The parts of ONNX Runtime's C interface that a custom operator and an execution provider without
// kernels need, written from its public documentation.
//
// The interface is a table of function pointers that only ever grows at its end, so a slot's number
// is its name: a library that asks for API version 18 runs on every release since 1.18. Each
// accessor below states one slot's number and signature; nothing else in this project may.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(_WIN32)
#define TQ_ORT_CALL __stdcall
#else
#define TQ_ORT_CALL
#endif

extern "C" {

struct OrtStatus;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtValue;
struct OrtTensorTypeAndShapeInfo;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtShapeInferContext;
struct OrtApi;
struct OrtMemoryInfo;
struct OrtDataTransferImpl;
struct OrtEpApi;
struct OrtEpDevice;
struct OrtEpGraphSupportInfo;
struct OrtGraph;
struct OrtHardwareDevice;
struct OrtKeyValuePairs;
struct OrtLogger;
struct OrtNode;
struct OrtNodeComputeInfo;

struct OrtApiBase {
  const OrtApi*(TQ_ORT_CALL* GetApi)(uint32_t version);
  const char*(TQ_ORT_CALL* GetVersionString)();
};

// Newer releases add members at its end.
struct OrtAllocator {
  uint32_t version;
  void*(TQ_ORT_CALL* Alloc)(OrtAllocator*, size_t);
  void(TQ_ORT_CALL* Free)(OrtAllocator*, void*);
};

// As of API version 18.
struct OrtCustomOp {
  uint32_t version;
  void*(TQ_ORT_CALL* CreateKernel)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*);
  const char*(TQ_ORT_CALL* GetName)(const OrtCustomOp*);
  const char*(TQ_ORT_CALL* GetExecutionProviderType)(const OrtCustomOp*);
  int(TQ_ORT_CALL* GetInputType)(const OrtCustomOp*, size_t);
  size_t(TQ_ORT_CALL* GetInputTypeCount)(const OrtCustomOp*);
  int(TQ_ORT_CALL* GetOutputType)(const OrtCustomOp*, size_t);
  size_t(TQ_ORT_CALL* GetOutputTypeCount)(const OrtCustomOp*);
  void(TQ_ORT_CALL* KernelCompute)(void*, OrtKernelContext*);
  void(TQ_ORT_CALL* KernelDestroy)(void*);
  int(TQ_ORT_CALL* GetInputCharacteristic)(const OrtCustomOp*, size_t);
  int(TQ_ORT_CALL* GetOutputCharacteristic)(const OrtCustomOp*, size_t);
  int(TQ_ORT_CALL* GetInputMemoryType)(const OrtCustomOp*, size_t);
  int(TQ_ORT_CALL* GetVariadicInputMinArity)(const OrtCustomOp*);
  int(TQ_ORT_CALL* GetVariadicInputHomogeneity)(const OrtCustomOp*);
  int(TQ_ORT_CALL* GetVariadicOutputMinArity)(const OrtCustomOp*);
  int(TQ_ORT_CALL* GetVariadicOutputHomogeneity)(const OrtCustomOp*);
  OrtStatus*(TQ_ORT_CALL* CreateKernelV2)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*,
                                          void**);
  OrtStatus*(TQ_ORT_CALL* KernelComputeV2)(void*, OrtKernelContext*);
  OrtStatus*(TQ_ORT_CALL* InferOutputShapeFn)(const OrtCustomOp*, OrtShapeInferContext*);
  int(TQ_ORT_CALL* GetStartVersion)(const OrtCustomOp*);
  int(TQ_ORT_CALL* GetEndVersion)(const OrtCustomOp*);
  size_t(TQ_ORT_CALL* GetMayInplace)(int**, int**);
  void(TQ_ORT_CALL* ReleaseMayInplace)(int*, int*);
  size_t(TQ_ORT_CALL* GetAliasMap)(int**, int**);
  void(TQ_ORT_CALL* ReleaseAliasMap)(int*, int*);
};

// As of API version 24; members without a signature here stay null.
struct OrtEp {
  uint32_t ort_version_supported;
  const char*(TQ_ORT_CALL* GetName)(const OrtEp*);
  OrtStatus*(TQ_ORT_CALL* GetCapability)(OrtEp*, const OrtGraph*, OrtEpGraphSupportInfo*);
  OrtStatus*(TQ_ORT_CALL* Compile)(OrtEp*, const OrtGraph**, const OrtNode**, size_t,
                                   OrtNodeComputeInfo**, OrtNode**);
  void(TQ_ORT_CALL* ReleaseNodeComputeInfos)(OrtEp*, OrtNodeComputeInfo**, size_t);
  void* GetPreferredDataLayout;
  void* ShouldConvertDataLayoutForOp;
  void* SetDynamicOptions;
  void* OnRunStart;
  void* OnRunEnd;
  void* CreateAllocator;
  void* CreateSyncStreamForDevice;
  void* GetCompiledModelCompatibilityInfo;
  void* GetKernelRegistry;
  void* IsConcurrentRunSupported;
};

struct OrtEpFactory {
  uint32_t ort_version_supported;
  const char*(TQ_ORT_CALL* GetName)(const OrtEpFactory*);
  const char*(TQ_ORT_CALL* GetVendor)(const OrtEpFactory*);
  OrtStatus*(TQ_ORT_CALL* GetSupportedDevices)(OrtEpFactory*, const OrtHardwareDevice* const*,
                                               size_t, OrtEpDevice**, size_t, size_t*);
  OrtStatus*(TQ_ORT_CALL* CreateEp)(OrtEpFactory*, const OrtHardwareDevice* const*,
                                    const OrtKeyValuePairs* const*, size_t,
                                    const OrtSessionOptions*, const OrtLogger*, OrtEp**);
  void(TQ_ORT_CALL* ReleaseEp)(OrtEpFactory*, OrtEp*);
  uint32_t(TQ_ORT_CALL* GetVendorId)(const OrtEpFactory*);
  const char*(TQ_ORT_CALL* GetVersion)(const OrtEpFactory*);
  void* ValidateCompiledModelCompatibilityInfo;
  OrtStatus*(TQ_ORT_CALL* CreateAllocator)(OrtEpFactory*, const OrtMemoryInfo*,
                                           const OrtKeyValuePairs*, OrtAllocator**);
  void(TQ_ORT_CALL* ReleaseAllocator)(OrtEpFactory*, OrtAllocator*);
  OrtStatus*(TQ_ORT_CALL* CreateDataTransfer)(OrtEpFactory*, OrtDataTransferImpl**);
  bool(TQ_ORT_CALL* IsStreamAware)(const OrtEpFactory*);
  void* CreateSyncStreamForDevice;
  void* GetHardwareDeviceIncompatibilityDetails;
  void* CreateExternalResourceImporterForDevice;
  OrtStatus*(TQ_ORT_CALL* GetNumCustomOpDomains)(OrtEpFactory*, size_t*);
  OrtStatus*(TQ_ORT_CALL* GetCustomOpDomains)(OrtEpFactory*, OrtCustomOpDomain**, size_t);
};

}  // extern "C"

namespace tq::ort {

inline constexpr uint32_t kApiVersion = 18;
inline constexpr uint32_t kEpApiVersion = 24;

static_assert(sizeof(OrtApiBase) == 2 * sizeof(void*));
static_assert(offsetof(OrtAllocator, Free) == 2 * sizeof(void*));
static_assert(offsetof(OrtCustomOp, CreateKernel) == 1 * sizeof(void*));
static_assert(offsetof(OrtCustomOp, KernelCompute) == 8 * sizeof(void*));
static_assert(offsetof(OrtCustomOp, GetInputCharacteristic) == 10 * sizeof(void*));
static_assert(offsetof(OrtCustomOp, GetInputMemoryType) == 12 * sizeof(void*));
static_assert(offsetof(OrtCustomOp, CreateKernelV2) == 17 * sizeof(void*));
static_assert(offsetof(OrtCustomOp, InferOutputShapeFn) == 19 * sizeof(void*));
static_assert(offsetof(OrtCustomOp, GetMayInplace) == 22 * sizeof(void*));
static_assert(sizeof(OrtCustomOp) == 26 * sizeof(void*));
static_assert(sizeof(OrtEp) == 15 * sizeof(void*));
static_assert(offsetof(OrtEpFactory, CreateAllocator) == 9 * sizeof(void*));
static_assert(offsetof(OrtEpFactory, GetNumCustomOpDomains) == 16 * sizeof(void*));
static_assert(sizeof(OrtEpFactory) == 18 * sizeof(void*));

enum ErrorCode : int { kFail = 1, kInvalidArgument = 2 };
enum ElementType : int {
  kFloat = 1,
  kUint8 = 2,
  kInt32 = 6,
  kInt64 = 7,
  kFloat16 = 10,
  kBfloat16 = 16,
};
enum Characteristic : int { kRequired = 0, kOptional = 1 };
enum DeviceType : int { kCpuDevice = 0 };
enum MemoryType : int { kCpuInput = -2, kDefaultMemory = 0 };

// One accessor per slot: `api.create_status(...)`.
class Api {
 public:
  explicit Api(const OrtApi* table) : table_(reinterpret_cast<void* const*>(table)) {}

  const char* error_message(const OrtStatus* status) const {
    return slot<const char*(const OrtStatus*)>(2)(status);
  }

  OrtStatus* create_status(int code, const char* message) const {
    return slot<OrtStatus*(int, const char*)>(0)(code, message);
  }
  OrtStatus* create_custom_op_domain(const char* name, OrtCustomOpDomain** domain) const {
    return slot<OrtStatus*(const char*, OrtCustomOpDomain**)>(26)(name, domain);
  }
  OrtStatus* custom_op_domain_add(OrtCustomOpDomain* domain, const OrtCustomOp* op) const {
    return slot<OrtStatus*(OrtCustomOpDomain*, const OrtCustomOp*)>(27)(domain, op);
  }
  OrtStatus* add_custom_op_domain(OrtSessionOptions* options, OrtCustomOpDomain* domain) const {
    return slot<OrtStatus*(OrtSessionOptions*, OrtCustomOpDomain*)>(28)(options, domain);
  }
  OrtStatus* get_tensor_mutable_data(OrtValue* value, void** data) const {
    return slot<OrtStatus*(OrtValue*, void**)>(51)(value, data);
  }
  OrtStatus* get_tensor_element_type(const OrtTensorTypeAndShapeInfo* info, int* type) const {
    return slot<OrtStatus*(const OrtTensorTypeAndShapeInfo*, int*)>(60)(info, type);
  }
  OrtStatus* get_dimensions_count(const OrtTensorTypeAndShapeInfo* info, size_t* count) const {
    return slot<OrtStatus*(const OrtTensorTypeAndShapeInfo*, size_t*)>(61)(info, count);
  }
  OrtStatus* get_dimensions(const OrtTensorTypeAndShapeInfo* info, int64_t* dims,
                            size_t count) const {
    return slot<OrtStatus*(const OrtTensorTypeAndShapeInfo*, int64_t*, size_t)>(62)(info, dims,
                                                                                    count);
  }
  OrtStatus* get_tensor_type_and_shape(const OrtValue* value,
                                       OrtTensorTypeAndShapeInfo** info) const {
    return slot<OrtStatus*(const OrtValue*, OrtTensorTypeAndShapeInfo**)>(65)(value, info);
  }
  OrtStatus* kernel_info_float(const OrtKernelInfo* info, const char* name, float* out) const {
    return slot<OrtStatus*(const OrtKernelInfo*, const char*, float*)>(85)(info, name, out);
  }
  OrtStatus* kernel_info_int64(const OrtKernelInfo* info, const char* name, int64_t* out) const {
    return slot<OrtStatus*(const OrtKernelInfo*, const char*, int64_t*)>(86)(info, name, out);
  }
  OrtStatus* kernel_info_string(const OrtKernelInfo* info, const char* name, char* out,
                                size_t* size) const {
    return slot<OrtStatus*(const OrtKernelInfo*, const char*, char*, size_t*)>(87)(info, name, out,
                                                                                   size);
  }
  OrtStatus* context_input_count(const OrtKernelContext* context, size_t* count) const {
    return slot<OrtStatus*(const OrtKernelContext*, size_t*)>(88)(context, count);
  }
  OrtStatus* context_input(const OrtKernelContext* context, size_t index,
                           const OrtValue** value) const {
    return slot<OrtStatus*(const OrtKernelContext*, size_t, const OrtValue**)>(90)(context, index,
                                                                                   value);
  }
  OrtStatus* context_output(OrtKernelContext* context, size_t index, const int64_t* dims,
                            size_t rank, OrtValue** value) const {
    return slot<OrtStatus*(OrtKernelContext*, size_t, const int64_t*, size_t, OrtValue**)>(91)(
        context, index, dims, rank, value);
  }
  void release_status(OrtStatus* status) const { slot<void(OrtStatus*)>(93)(status); }
  void release_tensor_type_and_shape(OrtTensorTypeAndShapeInfo* info) const {
    slot<void(OrtTensorTypeAndShapeInfo*)>(99)(info);
  }
  void release_custom_op_domain(OrtCustomOpDomain* domain) const {
    slot<void(OrtCustomOpDomain*)>(101)(domain);
  }
  // Since API version 5.
  void release_allocator(OrtAllocator* allocator) const {
    slot<void(OrtAllocator*)>(132)(allocator);
  }
  // Since API version 8. Says the size where `out` is null.
  OrtStatus* kernel_info_int64s(const OrtKernelInfo* info, const char* name, int64_t* out,
                                size_t* size) const {
    return slot<OrtStatus*(const OrtKernelInfo*, const char*, int64_t*, size_t*)>(163)(info, name,
                                                                                       out, size);
  }
  // Since API version 10. What the execution provider enqueues its work on.
  OrtStatus* context_stream(const OrtKernelContext* context, void** stream) const {
    return slot<OrtStatus*(const OrtKernelContext*, void**)>(193)(context, stream);
  }
  OrtStatus* get_tensor_memory_info(const OrtValue* value, const OrtMemoryInfo** info) const {
    return slot<OrtStatus*(const OrtValue*, const OrtMemoryInfo**)>(194)(value, info);
  }
  // Since API version 14. Inputs that are left out between others count, and have an empty name.
  OrtStatus* kernel_info_input_count(const OrtKernelInfo* info, size_t* count) const {
    return slot<OrtStatus*(const OrtKernelInfo*, size_t*)>(230)(info, count);
  }
  OrtStatus* kernel_info_input_name(const OrtKernelInfo* info, size_t index, char* out,
                                    size_t* size) const {
    return slot<OrtStatus*(const OrtKernelInfo*, size_t, char*, size_t*)>(232)(info, index, out,
                                                                               size);
  }
  // Since API version 15. Says the size where `out` is null.
  OrtStatus* kernel_info_node_name(const OrtKernelInfo* info, char* out, size_t* size) const {
    return slot<OrtStatus*(const OrtKernelInfo*, char*, size_t*)>(244)(info, out, size);
  }
  // Since API version 15. Null when the input is not a constant.
  OrtStatus* kernel_info_constant_input(const OrtKernelInfo* info, size_t index, int* is_constant,
                                        const OrtValue** value) const {
    return slot<OrtStatus*(const OrtKernelInfo*, size_t, int*, const OrtValue**)>(249)(
        info, index, is_constant, value);
  }
  // Since API version 15. What the execution provider allocates memory of that kind with; released
  // by the caller.
  OrtStatus* context_allocator(const OrtKernelContext* context, const OrtMemoryInfo* info,
                               OrtAllocator** allocator) const {
    return slot<OrtStatus*(const OrtKernelContext*, const OrtMemoryInfo*, OrtAllocator**)>(253)(
        context, info, allocator);
  }
  // Since API version 17.
  OrtStatus* context_parallel_for(const OrtKernelContext* context, void (*task)(void*, size_t),
                                  size_t total, size_t batches, void* argument) const {
    using Task = void (*)(void*, size_t);
    return slot<OrtStatus*(const OrtKernelContext*, Task, size_t, size_t, void*)>(274)(
        context, task, total, batches, argument);
  }
  // Since API version 22.
  int hardware_device_type(const OrtHardwareDevice* device) const {
    return slot<int(const OrtHardwareDevice*)>(307)(device);
  }
  // Since API version 22. Without metadata and options.
  OrtStatus* create_ep_device(OrtEpFactory* factory, const OrtHardwareDevice* device,
                              OrtEpDevice** out) const {
    const Api providers(reinterpret_cast<const OrtApi*>(slot<const OrtEpApi*()>(317)()));
    return providers
        .slot<OrtStatus*(OrtEpFactory*, const OrtHardwareDevice*, const OrtKeyValuePairs*,
                         const OrtKeyValuePairs*, OrtEpDevice**)>(0)(factory, device, nullptr,
                                                                     nullptr, out);
  }

 private:
  template <class Signature>
  struct Pointer;
  template <class Result, class... Arguments>
  struct Pointer<Result(Arguments...)> {
    using type = Result(TQ_ORT_CALL*)(Arguments...);
  };

  template <class Signature>
  typename Pointer<Signature>::type slot(size_t number) const {
    return reinterpret_cast<typename Pointer<Signature>::type>(table_[number]);
  }

  void* const* table_;
};

}  // namespace tq::ort
