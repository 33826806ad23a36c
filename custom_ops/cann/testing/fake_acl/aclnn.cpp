// Tensors, lists, arrays, and the two phases of a call.
#include "aclnn.h"

#include <cmath>
#include <cstring>
#include <mutex>
#include <set>

#include "element_types.h"
#include "fake_acl.h"
#include "memory.h"
#include "streams.h"

namespace fake_acl {
namespace {

constexpr std::size_t kPattern = 0xA5;  // what a workspace is filled with

struct State {
  std::mutex mutex;
  std::set<const void*> objects;  // tensors, lists, arrays and executors that are alive
  std::string refused;            // the operator that refuses every call
  int mutation = -1, call = 0, which = 0;  // what a test asks for, and calls until then
  bool was_mutated = false;
  Task late;  // waits for the next call
  std::vector<ViewRef> late_outputs;
};

State& state() {
  static State* const instance = new State;
  return *instance;
}

template <class Thing>
Thing* keep(Thing* thing) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().objects.insert(thing);
  return thing;
}

bool forget(const void* thing) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  return state().objects.erase(thing) == 1;
}

bool is_known(const void* thing) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  return state().objects.count(thing) == 1;
}

std::size_t bits_of(aclDataType type) {
  return type == ACL_INT4 ? 4 : 8 * aclDataTypeSize(type);
}

int unknown(const std::string& caller) {
  return refuse(kInvalid, caller + ": unknown or destroyed object");
}

template <class Each>
void for_each_place(const View& view, Each&& each) {
  Dims index(view.dims.size(), 0);
  int64_t place = view.offset;
  for (std::size_t i = 0; i < view.count(); ++i) {
    each(i, place);
    for (std::size_t d = index.size(); d-- > 0;) {
      place += view.strides[d];
      if (++index[d] < view.dims[d]) break;
      place -= view.strides[d] * view.dims[d];
      index[d] = 0;
    }
  }
}

// Whether the storage is in a live block, and the view in its storage.
Problem check_place(const View& view, const char* role) {
  int64_t last = view.offset;
  for (std::size_t d = 0; d < view.dims.size(); ++d) {
    last += (view.dims[d] - 1) * view.strides[d];
  }
  const std::string what = std::string(role) + " " + view.text();
  if (view.count() == 0) return {};
  if (view.offset < 0 || last >= static_cast<int64_t>(element_count(view.storage))) {
    return what + " leaves its storage " + to_string(view.storage);
  }
  if (!device_memory().is_live(view.data, view.bytes())) {
    return what + " is not inside a live block: " + device_memory().describe(view.data);
  }
  return {};
}

Problem check_places(const aclOpExecutor& plan) {
  for (const ViewRef& view : plan.inputs) {
    if (const Problem problem = check_place(*view, "input")) return problem;
  }
  for (const ViewRef& view : plan.outputs) {
    if (const Problem problem = check_place(*view, "output")) return problem;
  }
  return {};
}

}  // namespace

bool View::is_contiguous() const {
  int64_t stride = 1;
  for (std::size_t d = dims.size(); d-- > 0;) {
    if (dims[d] != 1 && strides[d] != stride) return false;
    stride *= dims[d];
  }
  return true;
}

std::string View::text() const {
  return std::string(type == ACL_INT4 ? "int4" : name_of(type)) + to_string(dims);
}

std::size_t View::bytes() const { return (element_count(storage) * bits_of(type) + 7) / 8; }

std::vector<float> View::read() const {
  std::vector<float> values(count());
  const uint8_t* const from = static_cast<const uint8_t*>(device_memory().alias(data));
  if (type == ACL_INT4) {
    for_each_place(*this, [&](std::size_t i, int64_t place) {
      const int code = from[place / 2] >> 4 * (place % 2) & 15;
      values[i] = static_cast<float>((code ^ 8) - 8);
    });
    return values;
  }
  with_type(type, [&](auto kind) {
    const auto* const typed = reinterpret_cast<const decltype(kind)*>(from);
    for_each_place(*this, [&](std::size_t i, int64_t place) {
      values[i] = static_cast<float>(load(typed[place]));
    });
  });
  return values;
}

void View::write(const std::vector<float>& values) const {
  uint8_t* const to = static_cast<uint8_t*>(device_memory().alias(data));
  if (type == ACL_INT4) {
    for_each_place(*this, [&](std::size_t i, int64_t place) {
      const int shift = 4 * (place % 2), code = static_cast<int>(values[i]) & 15;
      to[place / 2] = static_cast<uint8_t>((to[place / 2] & ~(15 << shift)) | code << shift);
    });
    return;
  }
  with_type(type, [&](auto kind) {
    using T = decltype(kind);
    T* const typed = reinterpret_cast<T*>(to);
    for_each_place(*this, [&](std::size_t i, int64_t place) {
      store(typed[place], static_cast<typename Compute<T>::type>(values[i]));
    });
  });
}

// Whether this is the call to be mutated so.
bool is_mutated(int kind) { return state().mutation == kind && state().call == 0; }

int64_t mutation_of(int which) {
  if (!is_mutated(FAKE_ACL_NUMBER) || state().which != which) return 0;
  state().was_mutated = true;
  return 1;
}

bool is_refused(const std::string& name) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  if (state().refused != name) return false;
  set_recent_error(name + " is refused");
  return true;
}

int plan(const char* name, std::vector<const aclTensor*> inputs,
         std::vector<const aclTensor*> outputs, const Problem& problem, uint64_t workspace, Work work,
         uint64_t* workspace_size, aclOpExecutor** executor) {
  counters().add(std::string(name) + "GetWorkspaceSize");
  if (workspace_size == nullptr || executor == nullptr) {
    return refuse(kNullPointer, std::string(name) + ": a null result");
  }
  if (is_refused(name)) return kInvalid;
  if (problem) return refuse(kInvalid, std::string(name) + " " + *problem);
  aclOpExecutor made{name, workspace, {}, {}, std::move(work)};
  int place = 0;
  for (auto* const tensors : {&inputs, &outputs}) {
    for (const aclTensor* tensor : *tensors) {
      if (tensor == nullptr || !is_mutated(FAKE_ACL_SHIFT) || place++ != state().which) continue;
      // Stays in a larger storage: the host would take a refusal for one of CANN's.
      tensor->view->offset += 1, tensor->view->storage.back() += 1;
      state().was_mutated = true;
    }
  }
  for (const aclTensor* tensor : inputs) {
    if (tensor == nullptr) continue;
    if (!is_known(tensor)) return unknown(name);
    made.inputs.push_back(tensor->view);
  }
  for (const aclTensor* tensor : outputs) {
    if (!is_known(tensor)) return unknown(name);
    made.outputs.push_back(tensor->view);
  }
  if (const Problem outside = check_places(made)) {
    if (!state().was_mutated) return refuse(kInvalid, std::string(name) + ": " + *outside);
    made.work = [outside] { return outside; };
  }
  *workspace_size = workspace;
  *executor = keep(new aclOpExecutor(std::move(made)));
  return ACL_SUCCESS;
}

int enqueue(const char* name, void* workspace, uint64_t bytes, aclOpExecutor* executor,
            void* stream) {
  counters().add(name);
  const std::string who = name;
  if (!is_known(executor) || executor->name != name) return unknown(who);
  forget(executor);
  const std::shared_ptr<aclOpExecutor> own(executor);
  const StreamRef on = find_stream(stream);
  if (on == nullptr) return refuse(kInvalid, who + ": unknown stream");
  for (const auto* const views : {&executor->inputs, &executor->outputs}) {
    for (const ViewRef& view : *views) {
      if (!view->is_alive) return refuse(kInvalid, who + ": a tensor was destroyed before its use");
    }
  }
  if (bytes != executor->workspace ||
      (bytes > 0 && !device_memory().is_live(workspace, bytes))) {
    return refuse(kInvalid, who + ": a workspace of " + std::to_string(bytes) + " bytes, planned " +
                                std::to_string(executor->workspace) + ": " +
                                device_memory().describe(workspace));
  }
  counters().add("op." + who);
  Task task = [own, workspace, bytes]() -> aclError {
    Problem problem = check_places(*own);
    // What is in a workspace of another call that is still to run, or in a tensor, is lost.
    if (bytes > 0) std::memset(device_memory().alias(workspace), kPattern, bytes);
    if (!problem) problem = own->work();
    if (!problem) return ACL_SUCCESS;
    return refuse(kRuntimeError, own->name + ", when the stream came to it: " + *problem);
  };
  const bool is_skipped = is_mutated(FAKE_ACL_SKIP), is_late = is_mutated(FAKE_ACL_LATE);
  --state().call;
  if (is_skipped) {
    state().was_mutated = true;
  } else if (is_late) {
    state().late = std::move(task), state().late_outputs = own->outputs;
  } else {
    on->enqueue(std::move(task));
    if (!state().late) return ACL_SUCCESS;
    for (const ViewRef& written : state().late_outputs) {
      for (const ViewRef& read : own->inputs) {
        if (read->data == written->data) state().was_mutated = true;
      }
    }
    on->enqueue(std::move(state().late));
    state().late = nullptr;
  }
  return ACL_SUCCESS;
}

}  // namespace fake_acl

using namespace fake_acl;

extern "C" {

void fake_acl_refuse_operator(const char* name) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().refused = name == nullptr ? "" : name;
}

void fake_acl_mutate_operator(int kind, int call, int which) {
  state().mutation = kind, state().call = call, state().which = which;
  state().was_mutated = false;
}

int fake_acl_was_mutated(void) { return state().was_mutated; }

size_t fake_acl_live_objects(void) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  return state().objects.size();
}

aclTensor* aclCreateTensor(const int64_t* viewDims, uint64_t viewDimsNum, aclDataType dataType,
                           const int64_t* stride, int64_t offset, aclFormat format,
                           const int64_t* storageDims, uint64_t storageDimsNum, void* tensorData) {
  counters().add(__func__);
  const bool is_given = viewDims != nullptr && stride != nullptr && storageDims != nullptr;
  if (!is_given || format != ACL_FORMAT_ND || bits_of(dataType) == 0 || tensorData == nullptr) {
    refuse(kInvalid, "aclCreateTensor: type " + std::to_string(dataType) + ", format " +
                         std::to_string(format) + ", null dims, strides or data");
    return nullptr;
  }
  const auto view = std::make_shared<View>(
      View{dataType, Dims(viewDims, viewDims + viewDimsNum), Dims(stride, stride + viewDimsNum),
           offset, Dims(storageDims, storageDims + storageDimsNum), tensorData});
  return keep(new aclTensor{view});
}

int aclDestroyTensor(const aclTensor* tensor) {
  if (!forget(tensor)) return unknown(__func__);
  tensor->view->is_alive = false;
  delete tensor;
  return ACL_SUCCESS;
}

aclTensorList* aclCreateTensorList(const aclTensor* const* value, uint64_t size) {
  return keep(new aclTensorList{{value, value + size}});
}

// With the tensors in it.
int aclDestroyTensorList(const aclTensorList* array) {
  if (!forget(array)) return unknown(__func__);
  for (const aclTensor* tensor : array->tensors) aclDestroyTensor(tensor);
  delete array;
  return ACL_SUCCESS;
}

aclIntArray* aclCreateIntArray(const int64_t* value, uint64_t size) {
  return keep(new aclIntArray{Dims(value, value + size)});
}

int aclDestroyIntArray(const aclIntArray* array) {
  if (!forget(array)) return unknown(__func__);
  delete array;
  return ACL_SUCCESS;
}

}  // extern "C"
