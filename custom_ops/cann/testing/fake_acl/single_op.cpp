// Launching single operators: everything that can be checked is checked before the launch, the
// memory once more when the stream comes to it.
#include "acl/acl_op_compiler.h"
#include "counters.h"
#include "operators.h"
#include "streams.h"

namespace fake_acl {

bool broadcasts(const Dims& from, const Dims& to) {
  if (from.size() > to.size()) return false;
  const std::size_t missing = to.size() - from.size();
  for (std::size_t i = 0; i < from.size(); ++i) {
    if (from[i] != to[missing + i] && from[i] != 1) return false;
  }
  return true;
}

std::size_t broadcast_index(std::size_t index, const Dims& to, const Dims& from) {
  if (from == to) return index;
  const std::size_t missing = to.size() - from.size();
  std::size_t result = 0, stride = 1;
  for (std::size_t i = to.size(); i-- > missing;) {
    const std::size_t size = static_cast<std::size_t>(to[i]);
    const std::size_t own = static_cast<std::size_t>(from[i - missing]);
    if (own != 1) result += index % size * stride;
    index /= size;
    stride *= own;
  }
  return result;
}

namespace {

// Null for a type that is not here.
const Operator* find_operator(const std::string& type) {
  for (const Operators* const all :
       {&elementwise_operators(), &matrix_operators(), &cast_operators()}) {
    const auto found = all->find(type);
    if (found != all->end()) return &found->second;
  }
  return nullptr;
}

std::string describe(const Inputs& inputs, const View& output) {
  std::string text = "; inputs";
  for (const View& input : inputs) text += " " + input.text();
  return text + ", output " + output.text();
}

// A tensor whose buffer is its storage; null without one.
ViewRef view_of(const aclTensorDesc* desc, const aclDataBuffer* buffer) {
  if (desc == nullptr || buffer == nullptr) return nullptr;
  const std::size_t size = aclDataTypeSize(desc->type);
  const int64_t room = size == 0 ? 0 : static_cast<int64_t>(buffer->bytes / size);
  Dims strides(desc->dims.size(), 1);
  for (std::size_t d = strides.size(); d-- > 1;) strides[d - 1] = strides[d] * desc->dims[d];
  return std::make_shared<View>(View{desc->type, desc->dims, strides, 0, {room}, buffer->address});
}

}  // namespace
}  // namespace fake_acl

using namespace fake_acl;

extern "C" aclError aclopCompileAndExecute(const char* opType, int numInputs,
                                           const aclTensorDesc* const inputDesc[],
                                           const aclDataBuffer* const inputs[], int numOutputs,
                                           const aclTensorDesc* const outputDesc[],
                                           aclDataBuffer* const outputs[], const aclopAttr* attr,
                                           aclopEngineType, aclopCompileType, const char*,
                                           aclrtStream stream) {
  FAKE_ACL_COUNT_CALL();
  Planned call{opType, {}, {}, {}, ACL_ERROR_INVALID_PARAM};
  const Operator* const op = find_operator(opType);
  const StreamRef on = find_stream(stream);
  if (on == nullptr) return call.refuse(": unknown stream");
  if (op == nullptr) {
    // A gap of this runtime, not a mistake of its caller.
    set_recent_error("the fake ACL runtime has no operator " + call.name);
    counters().add("missing_op." + call.name);
    return ACL_ERROR_OP_NOT_FOUND;
  }
  for (int i = 0; i < numInputs; ++i) call.inputs.push_back(view_of(inputDesc[i], inputs[i]));
  for (int i = 0; i < numOutputs; ++i) call.outputs.push_back(view_of(outputDesc[i], outputs[i]));
  if (call.outputs.size() != 1) {
    return call.refuse(" has " + std::to_string(call.outputs.size()) + " outputs");
  }
  Inputs given;
  for (const auto* const views : {&call.inputs, &call.outputs}) {
    for (const ViewRef& view : *views) {
      if (view == nullptr) return call.refuse(": a tensor is null");
      if (views == &call.inputs) given.push_back(*view);
    }
  }
  const View output = *call.outputs[0];
  if (const Problem problem = op->check(given, output, attr == nullptr ? aclopAttr{} : *attr)) {
    return call.refuse(" " + *problem + describe(given, output));
  }
  if (const Problem problem = call.check_places()) return call.refuse(*problem);
  call.work = [=](const Planned&) -> Problem {
    const Problem problem = op->run(given, output);
    return problem ? *problem + describe(given, output) : problem;
  };
  counters().add("op." + call.name);
  on->enqueue([call] { return call.run(); });
  return ACL_SUCCESS;
}
