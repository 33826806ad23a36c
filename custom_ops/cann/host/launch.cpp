// Streams and errors of the ACL runtime; the contract is in launch.h.
#include "cann/host/launch.h"

#include <stdexcept>
#include <string>

namespace tq::cann {

void* stream_of(const ort::Api& api, const OrtKernelContext* context, const char* op) {
  void* stream = nullptr;
  ort::check(api.context_stream(context, &stream));
  if (stream == nullptr) {
    // The default stream of the runtime is in no order with the provider's copies.
    throw ort::OpError(std::string(op) + ": the execution provider has no stream for this call");
  }
  return stream;
}

void expect_enqueued(const char* op, const char* what, int64_t status) {
  if (status == 0) return;
  throw std::runtime_error(std::string(op) + ": " + what + " was not enqueued, ACL error " +
                           std::to_string(status));
}

}  // namespace tq::cann
