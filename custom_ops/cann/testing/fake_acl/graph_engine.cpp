// Graph mode: what the provider hands to CANN's parser, compiled and run by whom a test names.
//
// The fake runtime knows no ONNX. A test gives it two functions (fake_acl_set_graph_engine): one is
// told the model and the shapes of its inputs, the other computes on the stream. Without them
// everything that would compile a graph says so and fails. Graphs whose outputs have no known shape
// are compiled, so that a test can look at them, and not run.
//
// The ACL headers at hand declare Graph and AscendString but not the functions that build a graph;
// of those only the mangled names can be checked, which the test of the symbols does.
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "acl/acl_mdl.h"
#include "counters.h"
#include "fake_acl.h"
#include "graph/graph.h"
#include "memory.h"
#include "streams.h"
#include "tensor.h"

using namespace fake_acl;

namespace {

constexpr const char* kNoEngine =
    "the fake ACL runtime has no graph mode unless a test brings one: set enable_cann_graph to 0";
constexpr const char* kInputShape = "input_shape";
constexpr std::size_t kDescriptionBytes = 1 << 16;

struct Output {
  std::size_t bytes;
  Dims dims;  // -1 where it is not known before a run
};

struct Compiled {
  std::vector<std::size_t> input_bytes;
  std::vector<Output> outputs;
};

struct Engine {
  std::mutex mutex;
  FakeAclCompileGraph* compile = nullptr;
  FakeAclRunGraph* run = nullptr;
  std::map<const ge::Graph*, std::string> parsed;
  std::map<uint32_t, Compiled> compiled;  // loaded or not, by number
  uint32_t next = 1;
};

// Never destroyed, as the counters.
Engine& engine() {
  static Engine* const instance = new Engine;
  return *instance;
}

aclError failed(const char* caller, const std::string& what) {
  set_recent_error(std::string(caller) + ": " + what);
  return ACL_ERROR_FEATURE_UNSUPPORTED;
}

ge::graphStatus graph_failed(const char* caller, const std::string& what) {
  failed(caller, what);
  return ge::GRAPH_FAILED;
}

// Lines "i BYTES" and "o BYTES DIM DIM ...", in the order of inputs and of outputs.
bool read_description(const std::string& text, Compiled* compiled) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string kind;
    std::size_t bytes = 0;
    if (!(words >> kind >> bytes)) return false;
    if (kind == "i") {
      compiled->input_bytes.push_back(bytes);
    } else if (kind == "o") {
      Output output{bytes, {}};
      for (int64_t dim = 0; words >> dim;) output.dims.push_back(dim);
      if (output.dims.size() > ACL_MAX_DIM_CNT) return false;
      compiled->outputs.push_back(std::move(output));
    } else {
      return false;
    }
  }
  return true;
}

bool find_compiled(uint32_t number, Compiled* compiled) {
  const std::lock_guard<std::mutex> lock(engine().mutex);
  const auto found = engine().compiled.find(number);
  if (found == engine().compiled.end()) return false;
  *compiled = found->second;
  return true;
}

}  // namespace

struct aclmdlDesc {
  Compiled graph;
};

struct aclmdlDataset {
  std::vector<aclDataBuffer*> buffers;  // not owned, as with ACL
};

namespace {

// The addresses where the host reads and writes them; empty if a buffer is not what it should be.
std::vector<void*> host_addresses(const aclmdlDataset* dataset,
                                  const std::vector<std::size_t>& wanted, const char* side) {
  std::vector<void*> addresses;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const aclDataBuffer* const buffer = dataset->buffers[i];
    if (buffer->bytes < wanted[i] || !device_memory().is_live(buffer->address, wanted[i])) {
      counters().violation("aclmdlExecuteAsync: " + std::string(side) + " " + std::to_string(i) +
                           " has " + std::to_string(buffer->bytes) + " bytes at " +
                           device_memory().describe(buffer->address) + ", expected " +
                           std::to_string(wanted[i]));
      return {};
    }
    addresses.push_back(device_memory().alias(buffer->address));
  }
  return addresses;
}

aclError run_graph(uint32_t number, const Compiled& graph, const aclmdlDataset& inputs,
                   const aclmdlDataset& outputs) {
  std::vector<std::size_t> output_bytes;
  for (const Output& output : graph.outputs) output_bytes.push_back(output.bytes);
  std::vector<void*> in = host_addresses(&inputs, graph.input_bytes, "input");
  std::vector<void*> out = host_addresses(&outputs, output_bytes, "output");
  if (in.size() != graph.input_bytes.size() || out.size() != output_bytes.size()) {
    return ACL_ERROR_INVALID_PARAM;
  }
  FakeAclRunGraph* run = nullptr;
  {
    const std::lock_guard<std::mutex> lock(engine().mutex);
    run = engine().run;
  }
  return run == nullptr || run(number, in.data(), out.data()) != 0 ? ACL_ERROR_FAILURE
                                                                   : ACL_SUCCESS;
}

}  // namespace

extern "C" void fake_acl_set_graph_engine(FakeAclCompileGraph* compile, FakeAclRunGraph* run) {
  const std::lock_guard<std::mutex> lock(engine().mutex);
  engine().compile = compile;
  engine().run = run;
}

namespace ge {

struct ModelBufferData {
  std::shared_ptr<uint8_t> data;
  uint64_t length = 0;
};

AscendString::AscendString(const char_t* const name)
    : name_(std::make_shared<std::string>(name == nullptr ? "" : name)) {}

const char_t* AscendString::GetString() const { return name_ ? name_->c_str() : ""; }

bool AscendString::operator<(const AscendString& d) const {
  const std::string none;
  return (name_ ? *name_ : none) < (d.name_ ? *d.name_ : none);
}

Graph::Graph(const char_t*) {}

graphStatus aclgrphBuildInitialize(std::map<AscendString, AscendString>&) {
  FAKE_ACL_COUNT_CALL();
  return GRAPH_SUCCESS;
}

void aclgrphBuildFinalize() { FAKE_ACL_COUNT_CALL(); }

graphStatus aclgrphParseONNXFromMem(const char* buffer, size_t size,
                                    const std::map<AscendString, AscendString>&, Graph& graph) {
  FAKE_ACL_COUNT_CALL();
  const std::lock_guard<std::mutex> lock(engine().mutex);
  if (engine().compile == nullptr) return graph_failed(__func__, kNoEngine);
  engine().parsed[&graph] = std::string(buffer, size);
  return GRAPH_SUCCESS;
}

graphStatus aclgrphBuildModel(const Graph& graph,
                              const std::map<AscendString, AscendString>& options,
                              ModelBufferData& model) {
  FAKE_ACL_COUNT_CALL();
  std::string onnx, shapes;
  uint32_t number = 0;
  FakeAclCompileGraph* compile = nullptr;
  {
    const std::lock_guard<std::mutex> lock(engine().mutex);
    const auto found = engine().parsed.find(&graph);
    if (found == engine().parsed.end()) return graph_failed(__func__, "a graph nobody parsed");
    onnx = std::move(found->second);
    engine().parsed.erase(found);
    compile = engine().compile;
    number = engine().next++;
  }
  for (const auto& [name, value] : options) {
    if (std::string(name.GetString()) == kInputShape) shapes = value.GetString();
  }
  std::string description(kDescriptionBytes, '\0');
  if (compile == nullptr ||
      compile(number, onnx.data(), onnx.size(), shapes.c_str(), description.data(),
              description.size()) != 0) {
    return graph_failed(__func__, "the test's engine does not compile this graph");
  }
  Compiled compiled;
  if (!read_description(description.c_str(), &compiled)) {
    return graph_failed(__func__, "the test's engine does not describe this graph");
  }
  const std::lock_guard<std::mutex> lock(engine().mutex);
  engine().compiled[number] = std::move(compiled);
  model.data = std::shared_ptr<uint8_t>(new uint8_t[sizeof number], std::default_delete<uint8_t[]>());
  std::memcpy(model.data.get(), &number, sizeof number);
  model.length = sizeof number;
  return GRAPH_SUCCESS;
}

graphStatus aclgrphSaveModel(const char*, const ModelBufferData&) {
  FAKE_ACL_COUNT_CALL();
  return graph_failed(__func__, "there is no file format: set dump_om_model to 0");
}

}  // namespace ge

extern "C" {

aclError aclmdlLoadFromMem(const void* model, size_t modelSize, uint32_t* modelId) {
  FAKE_ACL_COUNT_CALL();
  uint32_t number = 0;
  Compiled compiled;
  if (modelSize != sizeof number) return refuse(ACL_ERROR_INVALID_PARAM, "aclmdlLoadFromMem: size");
  std::memcpy(&number, model, sizeof number);
  if (!find_compiled(number, &compiled)) {
    return refuse(ACL_ERROR_INVALID_PARAM, "aclmdlLoadFromMem: no graph that was compiled here");
  }
  *modelId = number;
  return ACL_SUCCESS;
}

aclError aclmdlLoadFromFile(const char*, uint32_t*) {
  FAKE_ACL_COUNT_CALL();
  return failed(__func__, "there is no file format: set dump_om_model to 0");
}

aclError aclmdlUnload(uint32_t modelId) {
  FAKE_ACL_COUNT_CALL();
  const std::lock_guard<std::mutex> lock(engine().mutex);
  if (engine().compiled.erase(modelId) == 0) {
    return refuse(ACL_ERROR_INVALID_PARAM, "aclmdlUnload: unknown graph");
  }
  return ACL_SUCCESS;
}

aclmdlDesc* aclmdlCreateDesc() {
  FAKE_ACL_COUNT_CALL();
  return new aclmdlDesc;
}

aclError aclmdlDestroyDesc(aclmdlDesc* modelDesc) {
  FAKE_ACL_COUNT_CALL();
  delete modelDesc;
  return ACL_SUCCESS;
}

aclError aclmdlGetDesc(aclmdlDesc* modelDesc, uint32_t modelId) {
  FAKE_ACL_COUNT_CALL();
  if (!find_compiled(modelId, &modelDesc->graph)) {
    return refuse(ACL_ERROR_INVALID_PARAM, "aclmdlGetDesc: unknown graph");
  }
  return ACL_SUCCESS;
}

size_t aclmdlGetNumInputs(aclmdlDesc* modelDesc) {
  FAKE_ACL_COUNT_CALL();
  return modelDesc->graph.input_bytes.size();
}

size_t aclmdlGetNumOutputs(aclmdlDesc* modelDesc) {
  FAKE_ACL_COUNT_CALL();
  return modelDesc->graph.outputs.size();
}

size_t aclmdlGetInputSizeByIndex(aclmdlDesc* modelDesc, size_t index) {
  FAKE_ACL_COUNT_CALL();
  const auto& sizes = modelDesc->graph.input_bytes;
  return index < sizes.size() ? sizes[index] : 0;
}

size_t aclmdlGetOutputSizeByIndex(aclmdlDesc* modelDesc, size_t index) {
  FAKE_ACL_COUNT_CALL();
  const auto& outputs = modelDesc->graph.outputs;
  return index < outputs.size() ? outputs[index].bytes : 0;
}

aclError aclmdlGetOutputDims(const aclmdlDesc* modelDesc, size_t index, aclmdlIODims* dims) {
  FAKE_ACL_COUNT_CALL();
  if (index >= modelDesc->graph.outputs.size()) {
    return refuse(ACL_ERROR_INVALID_PARAM, "aclmdlGetOutputDims: no such output");
  }
  const Dims& known = modelDesc->graph.outputs[index].dims;
  dims->name[0] = '\0';
  dims->dimCount = known.size();
  for (size_t i = 0; i < known.size(); ++i) dims->dims[i] = known[i];
  return ACL_SUCCESS;
}

aclmdlDataset* aclmdlCreateDataset() {
  FAKE_ACL_COUNT_CALL();
  return new aclmdlDataset;
}

aclError aclmdlDestroyDataset(const aclmdlDataset* dataset) {
  FAKE_ACL_COUNT_CALL();
  delete dataset;
  return ACL_SUCCESS;
}

aclError aclmdlAddDatasetBuffer(aclmdlDataset* dataset, aclDataBuffer* dataBuffer) {
  FAKE_ACL_COUNT_CALL();
  dataset->buffers.push_back(dataBuffer);
  return ACL_SUCCESS;
}

aclDataBuffer* aclmdlGetDatasetBuffer(const aclmdlDataset* dataset, size_t index) {
  FAKE_ACL_COUNT_CALL();
  return index < dataset->buffers.size() ? dataset->buffers[index] : nullptr;
}

aclTensorDesc* aclmdlGetDatasetTensorDesc(const aclmdlDataset*, size_t) {
  FAKE_ACL_COUNT_CALL();
  return nullptr;
}

aclError aclmdlExecute(uint32_t, const aclmdlDataset*, aclmdlDataset*) {
  FAKE_ACL_COUNT_CALL();
  return failed(__func__, "outputs without a known shape are not simulated");
}

aclError aclmdlExecuteAsync(uint32_t modelId, const aclmdlDataset* input, aclmdlDataset* output,
                            aclrtStream stream) {
  FAKE_ACL_COUNT_CALL();
  Compiled graph;
  const StreamRef found = find_stream(stream);
  if (found == nullptr || !find_compiled(modelId, &graph)) {
    return refuse(ACL_ERROR_INVALID_PARAM, "aclmdlExecuteAsync: unknown stream or graph");
  }
  if (input->buffers.size() != graph.input_bytes.size() ||
      output->buffers.size() != graph.outputs.size()) {
    return refuse(ACL_ERROR_INVALID_PARAM, "aclmdlExecuteAsync: another number of buffers");
  }
  // The caller destroys its buffers' descriptions at once; what they say is kept here.
  std::vector<aclDataBuffer> kept;
  for (const auto* buffer : input->buffers) kept.push_back(*buffer);
  for (const auto* buffer : output->buffers) kept.push_back(*buffer);
  found->enqueue([modelId, graph, kept]() mutable {
    aclmdlDataset inputs, outputs;
    for (std::size_t i = 0; i < kept.size(); ++i) {
      (i < graph.input_bytes.size() ? inputs : outputs).buffers.push_back(&kept[i]);
    }
    return run_graph(modelId, graph, inputs, outputs);
  });
  return ACL_SUCCESS;
}

}  // extern "C"
