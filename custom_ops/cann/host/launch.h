// One call of an operator as launches of its kernel.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "cann/host/kernel_library.h"
#include "core/element.h"
#include "core/window.h"
#include "ort/tensor.h"
#include "tq/codec_spec.h"

namespace tq::cann {

// Consecutive sequences of one launch, with their common past length and padding. Lengths are on the
// host, and kernels read an array of lengths from the device; so sequences of different lengths get
// separate launches, which saves the copy of an array.
struct Part {
  int64_t first, count;
  uint32_t past_length, left_padding;
};

// The number of sequence `b`, from a tensor of one number for all sequences or one for each; 0
// without a tensor.
inline uint32_t of_sequence(const ort::Tensor& numbers, int64_t b) {
  if (numbers.type == 0) return 0;
  return static_cast<uint32_t>(numbers.as<int64_t>()[numbers.dims[0] == 1 ? 0 : b]);
}

template <class Launch>
void for_each_part(const ort::Tensor& past_length, const ort::Tensor& left_padding, int64_t batch,
                   Launch&& launch) {
  Part part{0, 0, 0, 0};
  for (int64_t b = 0; b < batch; ++b) {
    const uint32_t length = of_sequence(past_length, b), padding = of_sequence(left_padding, b);
    if (part.count > 0 && (length != part.past_length || padding != part.left_padding)) {
      launch(part);
      part.count = 0;
    }
    if (part.count == 0) part = {b, 0, length, padding};
    ++part.count;
  }
  if (part.count > 0) launch(part);
}

// An address or a size as the kernels take it (cann/kernels/tiling.h).
inline uint64_t address(const void* data) { return reinterpret_cast<uintptr_t>(data); }
inline uint32_t narrow(int64_t size) { return static_cast<uint32_t>(size); }

// How a tiling names a codec, in rows or in planes.
inline uint32_t kernel_bits(spec::Codec codec, const Window& window) {
  return narrow(codec.bits) + (spec::is_signed(codec.kind) ? kTqSignedBits : 0) +
         (window.has_planes ? kTqPlanes : 0);
}

// Where sequence `index` begins in a tensor with elements of `bytes`.
inline uint64_t sequence(const ort::Tensor& tensor, int64_t index, int64_t bytes) {
  const std::vector<int64_t>& dims = tensor.dims;
  return address(static_cast<uint8_t*>(tensor.data) +
                 index * dims[1] * dims[2] * dims[3] * bytes);
}

// Cores of a launch: no more than there are vectors.
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

// Enqueues a copy of at least one byte within the device.
void enqueue_copy(const KernelLibrary& library, const char* op, const char* what, void* to,
                  const void* from, int64_t bytes, void* stream);

}  // namespace tq::cann
