// CANN's operator library, libopapi.so, as far as the host code calls it: tensors, the two phases of a
// call, and the operators by the formulas of their documents.
//
// The first phase checks everything that can be checked and plans; the second enqueues. What the
// documents forbid is an error of the first phase and counted as a violation; checks are mostly
// stricter than CANN's. A refusal that a test asks for (fake_acl_refuse_operator) is no violation.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "counters.h"
#include "tensor.h"

namespace fake_acl {

// A tensor of the device with strides, in elements. Two INT4 share a byte, the first is in its low bits.
struct View {
  aclDataType type;
  Dims dims, strides;
  int64_t offset;
  Dims storage;
  void* data;
  bool is_alive = true;

  std::size_t count() const { return element_count(dims); }
  bool is_contiguous() const;
  std::string text() const;  // "float16[1,2]"
  // Elements in the order of their indices; only on a stream.
  std::vector<float> read() const;
  void write(const std::vector<float>& values) const;
  std::size_t bytes() const;  // of the storage
};

using ViewRef = std::shared_ptr<View>;
using Problem = std::optional<std::string>;
// Computes on a stream. Returns what is wrong with the values.
using Work = std::function<Problem()>;

enum AclnnError : int { kNullPointer = 161001, kInvalid = 161002, kRuntimeError = 361001 };

}  // namespace fake_acl

struct aclTensor {
  fake_acl::ViewRef view;
};
struct aclTensorList {
  std::vector<const aclTensor*> tensors;
};
struct aclIntArray {
  fake_acl::Dims values;
};
struct aclOpExecutor {
  std::string name;
  uint64_t workspace;
  std::vector<fake_acl::ViewRef> inputs, outputs;
  fake_acl::Work work;
};

namespace fake_acl {

// Whether a test asks for a refusal (fake_acl_refuse_operator).
bool is_refused(const std::string& name);
// What a test wants a number of a call to be larger by (fake_acl_mutate_operator). Asked once in a
// first phase.
int64_t mutation_of(int which);
// The first phase of an operator: null inputs are left out of `inputs`. `problem` is what the
// documents forbid about the call.
int plan(const char* name, std::vector<const aclTensor*> inputs,
         std::vector<const aclTensor*> outputs, const Problem& problem, uint64_t workspace, Work work,
         uint64_t* workspace_size, aclOpExecutor** executor);
// The second phase.
int enqueue(const char* name, void* workspace, uint64_t bytes, aclOpExecutor* executor, void* stream);

inline bool is_of(const aclTensor* tensor, std::initializer_list<aclDataType> types) {
  for (const aclDataType type : types) {
    if (tensor->view->type == type) return true;
  }
  return false;
}

}  // namespace fake_acl

// The second phase of an operator; its first one is written out.
#define FAKE_ACLNN_SECOND_PHASE(NAME)                                                        \
  extern "C" int NAME(void* workspace, uint64_t bytes, aclOpExecutor* executor, void* stream) { \
    return ::fake_acl::enqueue(#NAME, workspace, bytes, executor, stream);                   \
  }
