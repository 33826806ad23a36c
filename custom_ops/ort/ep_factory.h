// A second door for the operators: an execution provider that runs no node and brings the domain.
//
// RegisterCustomOps needs a call for each session options object. A plugin execution provider is
// registered once in a process, in every language that ONNX Runtime has a binding for, and sessions
// that it is added to get its domains. The kernels run on the CPU provider, as with the first door.
#pragma once

#include "ort/ort_abi.h"

namespace tq::ort {

// Makes the factory, with operators of its own, which it frees; see CreateEpFactories.
OrtEpFactory* create_ep_factory(const OrtApi* table);
void release_ep_factory(OrtEpFactory* factory);

}  // namespace tq::ort
