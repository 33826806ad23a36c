// CANN's operator library, libopapi.so, as far as the host code calls it: tensors, the two phases of a
// call, and the operators by the formulas of their documents.
//
// The first phase checks everything that can be checked and plans; the second enqueues. What the
// documents forbid is an error of the first phase and counted as a violation; checks are mostly
// stricter than CANN's. A refusal that a test asks for (fake_acl_refuse_operator) is no violation.
#pragma once

#include "counters.h"
#include "tensor.h"

namespace fake_acl {

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
  fake_acl::Planned call;
  uint64_t workspace;
};

namespace fake_acl {

// Whether a test asks for a refusal (fake_acl_refuse_operator).
bool is_refused(const std::string& name);
// What a test wants a number of a call to be larger by (fake_acl_mutate_operator). Asked once in a
// first phase.
int64_t mutation_of(int which);

// Elements of the inputs, which an operator makes those of the outputs.
using Values = std::vector<std::vector<float>>;
using Tensors = std::vector<const aclTensor*>;

// The first phase of an operator, by the name of its function.
struct FirstPhase {
  const char* function;
  uint64_t* workspace;
  aclOpExecutor** executor;

  // Of no null tensor. `check` says what the documents forbid about the call.
  int plan(const Tensors& inputs, const Tensors& outputs, uint64_t bytes,
           const std::function<Problem()>& check, Work work) const;
  // The same for an operator that computes with elements.
  int plan(const Tensors& inputs, const Tensors& outputs, uint64_t bytes,
           const std::function<Problem()>& check,
           const std::function<void(Values&)>& compute) const;
};

// The second phase.
int enqueue(const char* name, void* workspace, uint64_t bytes, aclOpExecutor* executor,
            void* stream);

}  // namespace fake_acl

// An operator, with the arguments of its first phase, of which the body follows.
#define FAKE_ACLNN(NAME, ...)                                                                   \
  extern "C" int NAME(void* workspace, uint64_t bytes, aclOpExecutor* executor, void* stream) { \
    return ::fake_acl::enqueue(#NAME, workspace, bytes, executor, stream);                      \
  }                                                                                             \
  extern "C" int NAME##GetWorkspaceSize(__VA_ARGS__, uint64_t* workspace, aclOpExecutor** executor)
