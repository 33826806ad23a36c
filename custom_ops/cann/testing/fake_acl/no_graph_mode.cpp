// Graph mode is not simulated: everything the provider needs to load is here, and everything that
// would parse, compile or run a graph says so and fails.
//
// The ACL headers at hand declare Graph and AscendString but not the functions that build a graph;
// of those only the mangled names can be checked, which the test of the symbols does.
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "acl/acl_mdl.h"
#include "counters.h"
#include "graph/graph.h"

namespace {

constexpr const char* kMessage =
    "the fake ACL runtime has no graph mode: set enable_cann_graph to 0";

aclError no_graphs(const char* caller) {
  fake_acl::set_recent_error(std::string(caller) + ": " + kMessage);
  return ACL_ERROR_FEATURE_UNSUPPORTED;
}

ge::graphStatus no_graph_status(const char* caller) {
  no_graphs(caller);
  return ge::GRAPH_FAILED;
}

}  // namespace

namespace ge {

struct ModelBufferData {
  std::shared_ptr<uint8_t> data;
  uint64_t length = 0;
};

AscendString::AscendString(const char_t* const name)
    : name_(std::make_shared<std::string>(name == nullptr ? "" : name)) {}

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

graphStatus aclgrphParseONNXFromMem(const char*, size_t,
                                    const std::map<AscendString, AscendString>&, Graph&) {
  FAKE_ACL_COUNT_CALL();
  return no_graph_status(__func__);
}

graphStatus aclgrphBuildModel(const Graph&, const std::map<AscendString, AscendString>&,
                              ModelBufferData&) {
  FAKE_ACL_COUNT_CALL();
  return no_graph_status(__func__);
}

graphStatus aclgrphSaveModel(const char*, const ModelBufferData&) {
  FAKE_ACL_COUNT_CALL();
  return no_graph_status(__func__);
}

}  // namespace ge

// One function of ACL's model interface that fails; `nothing` is what it returns.
#define FAKE_ACL_NO_GRAPHS(signature, nothing) \
  signature {                                  \
    FAKE_ACL_COUNT_CALL();                     \
    no_graphs(__func__);                       \
    return nothing;                            \
  }
#define FAKE_ACL_NO_GRAPHS_ERROR(signature) \
  FAKE_ACL_NO_GRAPHS(aclError signature, ACL_ERROR_FEATURE_UNSUPPORTED)

extern "C" {

FAKE_ACL_NO_GRAPHS(aclmdlDataset* aclmdlCreateDataset(), nullptr)
FAKE_ACL_NO_GRAPHS(aclmdlDesc* aclmdlCreateDesc(), nullptr)
FAKE_ACL_NO_GRAPHS(aclDataBuffer* aclmdlGetDatasetBuffer(const aclmdlDataset*, size_t), nullptr)
FAKE_ACL_NO_GRAPHS(aclTensorDesc* aclmdlGetDatasetTensorDesc(const aclmdlDataset*, size_t), nullptr)
FAKE_ACL_NO_GRAPHS(size_t aclmdlGetInputSizeByIndex(aclmdlDesc*, size_t), 0)
FAKE_ACL_NO_GRAPHS(size_t aclmdlGetOutputSizeByIndex(aclmdlDesc*, size_t), 0)
FAKE_ACL_NO_GRAPHS(size_t aclmdlGetNumInputs(aclmdlDesc*), 0)
FAKE_ACL_NO_GRAPHS(size_t aclmdlGetNumOutputs(aclmdlDesc*), 0)
FAKE_ACL_NO_GRAPHS_ERROR(aclmdlAddDatasetBuffer(aclmdlDataset*, aclDataBuffer*))
FAKE_ACL_NO_GRAPHS_ERROR(aclmdlDestroyDataset(const aclmdlDataset*))
FAKE_ACL_NO_GRAPHS_ERROR(aclmdlDestroyDesc(aclmdlDesc*))
FAKE_ACL_NO_GRAPHS_ERROR(aclmdlExecute(uint32_t, const aclmdlDataset*, aclmdlDataset*))
FAKE_ACL_NO_GRAPHS_ERROR(aclmdlExecuteAsync(uint32_t, const aclmdlDataset*, aclmdlDataset*,
                                            aclrtStream))
FAKE_ACL_NO_GRAPHS_ERROR(aclmdlGetDesc(aclmdlDesc*, uint32_t))
FAKE_ACL_NO_GRAPHS_ERROR(aclmdlGetOutputDims(const aclmdlDesc*, size_t, aclmdlIODims*))
FAKE_ACL_NO_GRAPHS_ERROR(aclmdlLoadFromFile(const char*, uint32_t*))
FAKE_ACL_NO_GRAPHS_ERROR(aclmdlLoadFromMem(const void*, size_t, uint32_t*))
FAKE_ACL_NO_GRAPHS_ERROR(aclmdlUnload(uint32_t))

}  // extern "C"
