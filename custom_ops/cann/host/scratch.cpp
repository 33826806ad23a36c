// Memory of the execution provider's allocator; the contract is in scratch.h.
#include "cann/host/scratch.h"

#include <stdexcept>
#include <string>

#include "ort/tensor.h"

namespace tq::cann {

Scratch::Scratch(const ort::Api& api, const OrtKernelContext* context, const char* op,
                 const spec::Input& input, size_t bytes)
    : api_(api) {
  if (bytes == 0) return;
  const OrtValue* value = nullptr;
  const OrtMemoryInfo* info = nullptr;
  ort::check(api.context_input(context, input.slot, &value));
  ort::check(api.get_tensor_memory_info(value, &info));
  ort::check(api.context_allocator(context, info, &allocator_));
  data_ = allocator_->Alloc(allocator_, bytes);
  if (data_ != nullptr) return;
  api.release_allocator(allocator_);
  throw std::runtime_error(std::string(op) + ": the device has no " + std::to_string(bytes) +
                           " bytes of memory left, which this call needs");
}

Scratch::~Scratch() {
  if (data_ == nullptr) return;
  allocator_->Free(allocator_, data_);
  api_.release_allocator(allocator_);
}

}  // namespace tq::cann
