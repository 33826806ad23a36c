// The operators that CANN brings along (libopapi.so), called on the provider's stream. Looked up at run
// time, as everything of CANN is: types and signatures are written from its public documentation.
//
// A call has two phases. The first checks its arguments and plans; what CANN does not support is an
// error there, before anything is enqueued, and becomes a VendorRefusal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <stdexcept>
#include <string>
#include <vector>

#include "cann/host/scratch.h"

extern "C" {
struct aclTensor;
struct aclTensorList;
struct aclIntArray;
struct aclOpExecutor;
}

namespace tq::cann {

enum class AclType : int { kFloat = 0, kFloat16 = 1, kInt8 = 2, kInt4 = 29 };

// The first phase of an operator failed, or CANN has no such operator.
class VendorRefusal : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The runtime, which the provider has loaded.
inline constexpr char kAclRuntime[] = "libascendcl.so";

class Aclnn {
 public:
  // Null where this process has no libopapi.so. Opened by the first caller and kept.
  static const Aclnn* find();

  struct Operator {
    void* first;
    int (*second)(void* workspace, uint64_t bytes, aclOpExecutor* executor, void* stream);
  };
  Operator get(const char* name) const;
  // ACL's message of this thread, which would fail the provider's next node.
  std::string take_message() const;

  aclTensor* (*create_tensor)(const int64_t* dims, uint64_t rank, int type, const int64_t* strides,
                              int64_t offset, int format, const int64_t* storage,
                              uint64_t storage_rank, void* data);
  aclTensorList* (*create_list)(const aclTensor* const* tensors, uint64_t count);
  aclIntArray* (*create_ints)(const int64_t* values, uint64_t count);
  int (*destroy_tensor)(const aclTensor*);
  int (*destroy_list)(const aclTensorList*);  // with its tensors
  int (*destroy_ints)(const aclIntArray*);
  int (*allocate)(void** memory, size_t bytes, int policy);
  int (*release)(void* memory);
  int (*copy)(void* to, size_t room, const void* from, size_t bytes, int kind);  // synchronous

 private:
  Aclnn() = default;
  void* library_ = nullptr;
  const char* (*message_)() = nullptr;
};

// Memory of the device that is kept until this ends.
class DeviceMemory {
 public:
  DeviceMemory(const Aclnn& aclnn, size_t bytes);
  ~DeviceMemory() { aclnn_.release(data_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  uint8_t* data() const { return static_cast<uint8_t*>(data_); }

 private:
  const Aclnn& aclnn_;
  void* data_ = nullptr;
};

// What the operators of one call need: tensors, which are destroyed when it ends, and scratch memory.
class VendorCall {
 public:
  VendorCall(const Aclnn& aclnn, const ort::Api& api, const OrtKernelContext* context, const char* op,
             const spec::Input& input, void* stream)
      : aclnn_(aclnn), api_(api), context_(context), op_(op), input_(input), stream_(stream) {}
  ~VendorCall();
  VendorCall(const VendorCall&) = delete;
  VendorCall& operator=(const VendorCall&) = delete;

  uint8_t* memory(int64_t bytes);
  const aclTensor* tensor(const void* data, AclType type, const std::vector<int64_t>& dims);
  const aclTensor* view(const void* data, AclType type, const std::vector<int64_t>& dims,
                        const std::vector<int64_t>& strides);
  const aclTensorList* list(const void* data, AclType type, const std::vector<int64_t>& dims);
  const aclIntArray* ints(const std::vector<int64_t>& values);

  // Enqueues an operator. The arguments are those of its first phase.
  template <class... Arguments>
  void run(const char* name, Arguments... arguments) {
    const Aclnn::Operator called = aclnn_.get(name);
    uint64_t bytes = 0;
    aclOpExecutor* executor = nullptr;
    using First = int(Arguments..., uint64_t*, aclOpExecutor**);
    const int status = reinterpret_cast<First*>(called.first)(arguments..., &bytes, &executor);
    if (status != 0) refuse(name, status);
    enqueue(name, called, bytes, executor);
  }

  // The operators that several callers need; matrices are float16, `columns` [D, D] is given by rows
  // or, transposed, by columns.
  void cast(const aclTensor* from, AclType type, const aclTensor* to);
  void multiply(const void* rows, int64_t count, int64_t size, const void* matrix, bool transposed,
                void* to);

 private:
  [[noreturn]] void refuse(const char* name, int status) const;
  void enqueue(const char* name, const Aclnn::Operator& called, uint64_t bytes,
               aclOpExecutor* executor);

  const Aclnn& aclnn_;
  const ort::Api& api_;
  const OrtKernelContext* const context_;
  const char* const op_;
  const spec::Input& input_;
  void* const stream_;
  std::deque<Scratch> scratch_;
  std::vector<const aclTensor*> tensors_;
  std::vector<const aclTensorList*> lists_;
  std::vector<const aclIntArray*> ints_;
};

}  // namespace tq::cann
