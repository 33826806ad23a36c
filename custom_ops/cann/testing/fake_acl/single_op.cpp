// Launching single operators: everything that can be checked is checked before the launch, the
// memory once more when the stream comes to it.
#include <map>
#include <string>
#include <vector>

#include "acl/acl_op_compiler.h"
#include "counters.h"
#include "memory.h"
#include "operators.h"
#include "streams.h"

namespace fake_acl {

const Operator* find_operator(const std::string& type) {
  static const std::map<std::string, Operator> all = [] {
    std::map<std::string, Operator> table;
    for (const auto* const list :
         {&elementwise_operators(), &matrix_operators(), &cast_operators()}) {
      for (const NamedOperator& named : *list) table[named.type] = named.op;
    }
    return table;
  }();
  const auto found = all.find(type);
  return found == all.end() ? nullptr : &found->second;
}

std::string describe(const std::vector<Tensor>& inputs, const Tensor& output) {
  std::string text = "inputs";
  for (const Tensor& input : inputs) {
    text += std::string(" ") + name_of(input.type) + to_string(input.dims);
  }
  return text + ", output " + name_of(output.type) + to_string(output.dims);
}

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

struct Launch {
  std::string name;
  const Operator* op;
  // Device addresses until the launch runs.
  std::vector<Tensor> inputs;
  std::vector<Tensor> outputs;
  aclopAttr attributes;

  aclError check_memory(const char* when) const {
    for (const auto* const tensors : {&inputs, &outputs}) {
      for (const Tensor& tensor : *tensors) {
        const std::size_t bytes = tensor.count() * aclDataTypeSize(tensor.type);
        if (bytes == 0 || device_memory().is_live(tensor.data, bytes)) continue;
        const bool is_input = tensors == &inputs;
        return refuse(ACL_ERROR_INVALID_PARAM,
                      "operator " + name + when + ": " + (is_input ? "input " : "output ") +
                          std::to_string(&tensor - tensors->data()) + ", " +
                          name_of(tensor.type) + to_string(tensor.dims) +
                          ", is not inside a live block: " + device_memory().describe(tensor.data));
      }
    }
    return ACL_SUCCESS;
  }

  aclError run() const {
    const aclError error = check_memory(", when the stream came to it");
    if (error != ACL_SUCCESS || outputs[0].count() == 0) return error;
    std::vector<Tensor> reachable = inputs;
    for (Tensor& tensor : reachable) tensor.data = device_memory().alias(tensor.data);
    Tensor output = outputs[0];
    output.data = device_memory().alias(output.data);
    const auto problem = op->run(reachable, output);
    if (!problem) return ACL_SUCCESS;
    return refuse(ACL_ERROR_INVALID_PARAM,
                  "operator " + name + " " + *problem + "; " + describe(inputs, output));
  }
};

// A tensor whose buffer holds at least what its description says.
aclError add_tensor(const std::string& name, const char* role, int index,
                    const aclTensorDesc* desc, const aclDataBuffer* buffer,
                    std::vector<Tensor>& tensors) {
  const std::string what = "operator " + name + ": " + role + " " + std::to_string(index);
  if (desc == nullptr || buffer == nullptr) {
    return refuse(ACL_ERROR_INVALID_PARAM, what + " is null");
  }
  const std::size_t bytes = aclGetTensorDescSize(desc);
  if (buffer->bytes < bytes) {
    return refuse(ACL_ERROR_INVALID_PARAM, what + ": " + name_of(desc->type) +
                                               to_string(desc->dims) + " needs " +
                                               std::to_string(bytes) + " bytes, its buffer has " +
                                               std::to_string(buffer->bytes));
  }
  tensors.push_back({desc->type, desc->dims, buffer->address});
  return ACL_SUCCESS;
}

}  // namespace
}  // namespace fake_acl

using namespace fake_acl;

extern "C" aclError aclopCompileAndExecute(
    const char* opType, int numInputs, const aclTensorDesc* const inputDesc[],
    const aclDataBuffer* const inputs[], int numOutputs, const aclTensorDesc* const outputDesc[],
    aclDataBuffer* const outputs[], const aclopAttr* attr, aclopEngineType, aclopCompileType,
    const char*, aclrtStream stream) {
  FAKE_ACL_COUNT_CALL();
  Launch launch{opType, find_operator(opType), {}, {}, attr == nullptr ? aclopAttr{} : *attr};
  const StreamRef on = find_stream(stream);
  if (on == nullptr) {
    return refuse(ACL_ERROR_INVALID_PARAM, "operator " + launch.name + ": unknown stream");
  }
  if (launch.op == nullptr) {
    // A gap of this runtime, not a mistake of its caller.
    set_recent_error("the fake ACL runtime has no operator " + launch.name);
    counters().add("missing_op." + launch.name);
    return ACL_ERROR_OP_NOT_FOUND;
  }
  for (int i = 0; i < numInputs; ++i) {
    const aclError error =
        add_tensor(launch.name, "input", i, inputDesc[i], inputs[i], launch.inputs);
    if (error != ACL_SUCCESS) return error;
  }
  for (int i = 0; i < numOutputs; ++i) {
    const aclError error =
        add_tensor(launch.name, "output", i, outputDesc[i], outputs[i], launch.outputs);
    if (error != ACL_SUCCESS) return error;
  }
  if (launch.outputs.size() != 1) {
    return refuse(ACL_ERROR_INVALID_PARAM, "operator " + launch.name + " has " +
                                               std::to_string(launch.outputs.size()) + " outputs");
  }
  if (const auto problem =
          launch.op->check(launch.inputs, launch.outputs[0], launch.attributes)) {
    return refuse(ACL_ERROR_INVALID_PARAM, "operator " + launch.name + " " + *problem + "; " +
                                               describe(launch.inputs, launch.outputs[0]));
  }
  const aclError error = launch.check_memory("");
  if (error != ACL_SUCCESS) return error;
  counters().add("op." + launch.name);
  on->enqueue([launch] { return launch.run(); });
  return ACL_SUCCESS;
}
