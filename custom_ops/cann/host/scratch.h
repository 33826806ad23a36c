// Device memory for one call, of the allocator that the execution provider has for its tensors.
//
// It is freed when the call returns, before its launches have run. The next user of the memory is
// enqueued after them on the same stream, as with every intermediate value of the provider.
#pragma once

#include "ort/ort_abi.h"
#include "tq/operators.h"

namespace tq::cann {

class Scratch {
 public:
  // `bytes` where the tensor of `input` is; none with 0 bytes. Throws if there is no memory.
  Scratch(const ort::Api& api, const OrtKernelContext* context, const char* op,
          const spec::Input& input, size_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  void* data() const { return data_; }

 private:
  const ort::Api& api_;
  OrtAllocator* allocator_ = nullptr;
  void* data_ = nullptr;
};

}  // namespace tq::cann
