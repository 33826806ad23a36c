// One call of an operator as launches of its kernel.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "cann/host/kernel_library.h"
#include "core/element.h"
#include "ort/tensor.h"

namespace tq::cann {

// The sequences of a launch and their common past. Lengths are on the host, and the kernels read an
// array of them on the device: sequences of different lengths get a launch each instead of a copy.
struct Part {
  int64_t first, count;
  uint32_t past_length;
};

template <class Launch>
void for_each_part(const ort::Tensor& past_length, int64_t batch, Launch&& launch) {
  const int64_t* const lengths = past_length.as<int64_t>();
  const int64_t* const end = lengths + past_length.dims[0];
  if (std::all_of(lengths, end, [&](int64_t one) { return one == lengths[0]; })) {
    launch(Part{0, batch, static_cast<uint32_t>(lengths[0])});
    return;
  }
  for (int64_t b = 0; b < batch; ++b) launch(Part{b, 1, static_cast<uint32_t>(lengths[b])});
}

// Where sequence `index` begins in a tensor with elements of `bytes`.
inline void* sequence(const ort::Tensor& tensor, int64_t index, int64_t bytes) {
  const std::vector<int64_t>& dims = tensor.dims;
  return static_cast<uint8_t*>(tensor.data) + index * dims[1] * dims[2] * dims[3] * bytes;
}

// A kernel enqueues and returns; no more cores than it has vectors.
inline uint32_t cores_for(int64_t vectors, uint32_t most) {
  return static_cast<uint32_t>(std::min<int64_t>(vectors, most));
}

void* stream_of(const ort::Api& api, const OrtKernelContext* context, const char* op);

// Waits for all that was enqueued on the call's stream, if it has one.
void wait_for_stream(const ort::Api& api, const OrtKernelContext* context,
                     const KernelLibrary& library);

std::string node_name(const ort::Api& api, const OrtKernelInfo* info);

// An operator whose calls fail with an idle stream. When a run fails the provider destroys its
// stream, and the caller may free the inputs; neither waits for their copies to the device.
template <class Kernel>
class DrainOnError : public Kernel {
 public:
  // A refusal names the node.
  DrainOnError(const ort::Api& api, const OrtKernelInfo* info, Element element) try
      : Kernel(api, info, element) {
  } catch (const ort::OpError& error) {
    throw ort::OpError("node '" + node_name(api, info) + "': " + error.what());
  }

  void compute(OrtKernelContext* context) {
    try {
      Kernel::compute(context);
    } catch (...) {
      wait_for_stream(this->api(), context, this->library());
      throw;
    }
  }
};

// Throws unless `status` is 0. `what` is what was to be enqueued.
void expect_enqueued(const char* op, const char* what, int64_t status);

// Copies within the device, of a byte at least.
void enqueue_copy(const KernelLibrary& library, const char* op, const char* what, void* to,
                  const void* from, int64_t bytes, void* stream);

}  // namespace tq::cann
