// Tensors, lists, arrays, and the two phases of a call.
#include "aclnn.h"

#include <cstring>
#include <mutex>
#include <set>

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

int unknown(const std::string& caller) {
  return refuse(kInvalid, caller + ": unknown or destroyed object");
}

}  // namespace

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

int FirstPhase::plan(const Tensors& inputs, const Tensors& outputs, uint64_t bytes,
                     const std::function<Problem()>& check, Work work) const {
  counters().add(function);
  const std::string name(function, std::strlen(function) - std::strlen("GetWorkspaceSize"));
  aclOpExecutor made{{name, {}, {}, std::move(work), kRuntimeError}, bytes};
  if (workspace == nullptr || executor == nullptr)
    return refuse(kNullPointer, name + ": a null result");
  if (is_refused(name)) return kInvalid;
  int place = 0;
  for (const auto* const tensors : {&inputs, &outputs}) {
    auto& views = tensors == &inputs ? made.call.inputs : made.call.outputs;
    for (const aclTensor* tensor : *tensors) {
      if (tensor == nullptr) return refuse(kNullPointer, name + ": a null tensor");
      if (!is_known(tensor)) return unknown(name);
      views.push_back(tensor->view);
    }
  }
  if (const Problem problem = check()) return refuse(kInvalid, name + " " + *problem);
  for (const auto* const views : {&made.call.inputs, &made.call.outputs}) {
    for (const ViewRef& view : *views) {
      if (!is_mutated(FAKE_ACL_SHIFT) || place++ != state().which) continue;
      // Stays in a larger storage: the host would take a refusal for one of CANN's.
      view->offset += 1, view->storage.back() += 1;
      state().was_mutated = true;
    }
  }
  if (const Problem outside = made.call.check_places()) {
    if (!state().was_mutated) return refuse(kInvalid, name + *outside);
    made.call.work = [outside](const Planned&) { return outside; };
  }
  *workspace = bytes;
  *executor = keep(new aclOpExecutor(std::move(made)));
  return ACL_SUCCESS;
}

int FirstPhase::plan(const Tensors& inputs, const Tensors& outputs, uint64_t bytes,
                     const std::function<Problem()>& check,
                     const std::function<void(Values&)>& compute) const {
  return plan(inputs, outputs, bytes, check, [compute](const Planned& call) -> Problem {
    Values values;
    for (const ViewRef& view : call.inputs) values.push_back(view->read());
    values.resize(std::max(values.size(), call.outputs.size()));
    compute(values);
    for (std::size_t i = 0; i < call.outputs.size(); ++i) call.outputs[i]->write(values[i]);
    return {};
  });
}

int enqueue(const char* name, void* workspace, uint64_t bytes, aclOpExecutor* executor,
            void* stream) {
  counters().add(name);
  const std::string who = name;
  if (!is_known(executor) || executor->call.name != name) return unknown(who);
  forget(executor);
  const std::shared_ptr<aclOpExecutor> own(executor);
  const Planned& call = own->call;
  const StreamRef on = find_stream(stream);
  if (on == nullptr) return refuse(kInvalid, who + ": unknown stream");
  for (const auto* const views : {&call.inputs, &call.outputs}) {
    for (const ViewRef& view : *views) {
      if (!view->is_alive) return refuse(kInvalid, who + ": a tensor was destroyed before its use");
    }
  }
  if (bytes != own->workspace || (bytes > 0 && !device_memory().is_live(workspace, bytes))) {
    return refuse(kInvalid, who + ": a workspace of " + std::to_string(bytes) + " bytes, planned " +
                                std::to_string(own->workspace) + ": " +
                                device_memory().describe(workspace));
  }
  counters().add("op." + who);
  counters().add("elements." + who, call.outputs[0]->count());
  Task task = [own, workspace, bytes]() -> aclError {
    // What is in a workspace of another call that is still to run, or in a tensor, is lost.
    if (bytes > 0) std::memset(device_memory().alias(workspace), kPattern, bytes);
    return own->call.run();
  };
  const bool is_skipped = is_mutated(FAKE_ACL_SKIP), is_late = is_mutated(FAKE_ACL_LATE);
  --state().call;
  if (is_skipped) {
    state().was_mutated = true;
  } else if (is_late) {
    state().late = std::move(task), state().late_outputs = call.outputs;
  } else {
    on->enqueue(std::move(task));
    if (!state().late) return ACL_SUCCESS;
    for (const ViewRef& written : state().late_outputs) {
      for (const ViewRef& read : call.inputs) {
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
