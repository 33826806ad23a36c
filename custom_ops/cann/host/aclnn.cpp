// CANN's operators; the contract is in aclnn.h.
#include "cann/host/aclnn.h"

#include <dlfcn.h>

namespace tq::cann {
namespace {

constexpr int kFormatNd = 2;
constexpr const char* kLibrary = "libopapi.so";

template <class Function>
bool look_up(void* library, const char* name, Function*& function) {
  function = library == nullptr ? nullptr : reinterpret_cast<Function*>(dlsym(library, name));
  return function != nullptr;
}

}  // namespace

const Aclnn* Aclnn::find() {
  static const Aclnn* const found = []() -> const Aclnn* {
    static Aclnn aclnn;
    // Its functions for tensors are in a library that it is linked to, which dlsym looks at, too.
    void* const library = aclnn.library_ = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
    void* const runtime = dlopen(kAclRuntime, RTLD_LAZY | RTLD_NOLOAD);
    const bool is_whole = look_up(library, "aclCreateTensor", aclnn.create_tensor) &&
                          look_up(library, "aclCreateTensorList", aclnn.create_list) &&
                          look_up(library, "aclCreateIntArray", aclnn.create_ints) &&
                          look_up(library, "aclDestroyTensor", aclnn.destroy_tensor) &&
                          look_up(library, "aclDestroyTensorList", aclnn.destroy_list) &&
                          look_up(library, "aclDestroyIntArray", aclnn.destroy_ints) &&
                          look_up(runtime, "aclrtMalloc", aclnn.allocate) &&
                          look_up(runtime, "aclrtFree", aclnn.release) &&
                          look_up(runtime, "aclrtMemcpy", aclnn.copy) &&
                          look_up(runtime, "aclGetRecentErrMsg", aclnn.message_);
    return is_whole ? &aclnn : nullptr;
  }();
  return found;
}

Aclnn::Operator Aclnn::get(const char* name) const {
  Operator called{};
  const std::string first = std::string(name) + "GetWorkspaceSize";
  called.first = dlsym(library_, first.c_str());
  if (called.first == nullptr || !look_up(library_, name, called.second)) {
    throw VendorRefusal(std::string(kLibrary) + " has no " + name);
  }
  return called;
}

std::string Aclnn::take_message() const {
  const char* const message = message_();
  return message == nullptr ? "" : message;
}

DeviceMemory::DeviceMemory(const Aclnn& aclnn, size_t bytes) : aclnn_(aclnn) {
  if (aclnn.allocate(&data_, bytes, 0) == 0) return;
  throw std::runtime_error("the device has no " + std::to_string(bytes) + " bytes of memory left");
}

VendorCall::~VendorCall() {
  for (const aclTensorList* list : lists_) aclnn_.destroy_list(list);
  for (const aclTensor* tensor : tensors_) aclnn_.destroy_tensor(tensor);
  for (const aclIntArray* ints : ints_) aclnn_.destroy_ints(ints);
}

uint8_t* VendorCall::memory(int64_t bytes) {
  scratch_.emplace_back(api_, context_, op_, input_, static_cast<size_t>(bytes));
  return static_cast<uint8_t*>(scratch_.back().data());
}

const aclTensor* VendorCall::view(const void* data, AclType type, const std::vector<int64_t>& dims,
                                  const std::vector<int64_t>& strides) {
  int64_t storage = 1;
  for (size_t d = 0; d < dims.size(); ++d) storage += (dims[d] - 1) * strides[d];
  const aclTensor* const tensor =
      aclnn_.create_tensor(dims.data(), dims.size(), static_cast<int>(type), strides.data(), 0,
                           kFormatNd, &storage, 1, const_cast<void*>(data));
  if (tensor == nullptr) throw std::runtime_error(std::string(op_) + ": CANN makes no tensor");
  tensors_.push_back(tensor);
  return tensor;
}

const aclTensor* VendorCall::tensor(const void* data, AclType type,
                                    const std::vector<int64_t>& dims) {
  std::vector<int64_t> strides(dims.size(), 1);
  for (size_t d = dims.size(); d-- > 1;) strides[d - 1] = strides[d] * dims[d];
  return view(data, type, dims, strides);
}

const aclTensorList* VendorCall::list(const void* data, AclType type,
                                      const std::vector<int64_t>& dims) {
  const aclTensor* const one = tensor(data, type, dims);
  const aclTensorList* const made = aclnn_.create_list(&one, 1);
  if (made == nullptr) throw std::runtime_error(std::string(op_) + ": CANN makes no list");
  tensors_.pop_back();
  lists_.push_back(made);
  return made;
}

const aclIntArray* VendorCall::ints(const std::vector<int64_t>& values) {
  ints_.push_back(aclnn_.create_ints(values.data(), values.size()));
  return ints_.back();
}

void VendorCall::cast(const aclTensor* from, AclType type, const aclTensor* to) {
  run("aclnnCast", from, static_cast<int>(type), to);
}

void VendorCall::multiply(const void* rows, int64_t count, int64_t size, const void* matrix,
                          bool transposed, void* to) {
  const int64_t by_row = transposed ? 1 : size, by_column = transposed ? size : 1;
  run("aclnnMatmul", tensor(rows, AclType::kFloat16, {count, size}),
      view(matrix, AclType::kFloat16, {size, size}, {by_row, by_column}),
      tensor(to, AclType::kFloat16, {count, size}), int8_t{0});
}

void VendorCall::refuse(const char* name, int status) const {
  const std::string message = aclnn_.take_message();
  throw VendorRefusal(std::string(name) + " refuses with error " + std::to_string(status) +
                      (message.empty() ? "" : ": " + message));
}

void VendorCall::enqueue(const char* name, const Aclnn::Operator& called, uint64_t bytes,
                         aclOpExecutor* executor) {
  void* const workspace = bytes == 0 ? nullptr : memory(static_cast<int64_t>(bytes));
  const int status = called.second(workspace, bytes, executor, stream_);
  if (status == 0) return;
  throw std::runtime_error(std::string(op_) + ": " + name + " was not enqueued, error " +
                           std::to_string(status));
}

}  // namespace tq::cann
