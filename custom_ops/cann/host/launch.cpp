// Streams and errors of the ACL runtime; the contract is in launch.h.
#include "cann/host/launch.h"

#include <stdexcept>
#include <string>

namespace tq::cann {
namespace {

constexpr int kDeviceToDevice = 3;  // aclrtMemcpyKind

}  // namespace

void* stream_of(const ort::Api& api, const OrtKernelContext* context, const char* op) {
  void* stream = nullptr;
  ort::check(api.context_stream(context, &stream));
  if (stream == nullptr) {
    // The default stream of the runtime is in no order with the provider's copies.
    throw ort::OpError(std::string(op) + ": the execution provider has no stream for this call");
  }
  return stream;
}

std::string node_name(const ort::Api& api, const OrtKernelInfo* info) {
  size_t size = 0;  // with the terminator
  ort::check(api.kernel_info_node_name(info, nullptr, &size));
  std::string name(size, '\0');
  ort::check(api.kernel_info_node_name(info, name.data(), &size));
  name.resize(size > 0 ? size - 1 : 0);
  return name;
}

void wait_for_stream(const ort::Api& api, const OrtKernelContext* context,
                     const KernelLibrary& library) {
  void* stream = nullptr;
  if (OrtStatus* status = api.context_stream(context, &stream)) api.release_status(status);
  // What the stream itself has to report comes after what failed here.
  if (stream != nullptr) library.wait(stream);
}

void expect_enqueued(const char* op, const char* what, int64_t status) {
  if (status == 0) return;
  throw std::runtime_error(std::string(op) + ": " + what + " was not enqueued, ACL error " +
                           std::to_string(status));
}

void enqueue_copy(const KernelLibrary& library, const char* op, const char* what, void* to,
                  const void* from, int64_t bytes, void* stream) {
  const size_t size = static_cast<size_t>(bytes);
  expect_enqueued(op, what, library.copy(to, size, from, size, kDeviceToDevice, stream));
}

}  // namespace tq::cann
