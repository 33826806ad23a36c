#include "copies.h"

#include <cstring>
#include <mutex>
#include <string>

#include "counters.h"
#include "fake_acl.h"
#include "memory.h"
#include "streams.h"

namespace fake_acl {
namespace {

struct Direction {
  const char* name;
  bool from_device, to_device;
};

// By kind: those that the provider asks for.
constexpr Direction kDirections[] = {{"host_to_host", false, false},
                                     {"host_to_device", false, true},
                                     {"device_to_host", true, false},
                                     {"device_to_device", true, true}};

std::mutex lengthened_mutex;
int lengthened_kind = -1;
std::size_t lengthened_bytes = 0;

// One end of a copy, on the side that its direction says.
aclError check_end(const std::string& what, const void* address, std::size_t bytes,
                   bool on_device) {
  if (address == nullptr) return refuse(ACL_ERROR_INVALID_PARAM, what + " is null");
  const DeviceMemory& memory = device_memory();
  const std::string range = std::to_string(bytes) + " bytes at " + memory.describe(address);
  if (!on_device && memory.is_device(address, bytes)) {
    return refuse(ACL_ERROR_INVALID_PARAM, what + " should be host memory: " + range);
  }
  if (on_device && !memory.is_live(address, bytes)) {
    return refuse(ACL_ERROR_INVALID_PARAM, what + " is not inside a live block: " + range);
  }
  return ACL_SUCCESS;
}

void count_copy(const Copy& copy) {
  const std::string name = kDirections[copy.kind].name;
  counters().add("copy." + name);
  counters().add("bytes." + name, copy.bytes);
}

void* reachable(const void* address) {
  void* const alias = device_memory().alias(address);
  return alias != nullptr ? alias : const_cast<void*>(address);
}

}  // namespace

aclError Copy::check(const char* caller) const {
  if (kind > ACL_MEMCPY_DEVICE_TO_DEVICE) {
    return refuse(ACL_ERROR_INVALID_PARAM, std::string(caller) + ": unsupported kind of copy " +
                                               std::to_string(static_cast<int>(kind)));
  }
  const Direction* const direction = &kDirections[kind];
  const std::string what = std::string(caller) + " " + direction->name;
  if (bytes > room) {
    return refuse(ACL_ERROR_INVALID_PARAM, what + ": " + std::to_string(bytes) +
                                               " bytes do not fit into " + std::to_string(room));
  }
  const aclError error = check_end(what + ": the destination", to, bytes, direction->to_device);
  if (error != ACL_SUCCESS) return error;
  return check_end(what + ": the source", from, bytes, direction->from_device);
}

void Copy::run() const { std::memmove(reachable(to), reachable(from), bytes); }

Copy requested_copy(void* to, std::size_t room, const void* from, std::size_t bytes,
                    aclrtMemcpyKind kind) {
  const std::lock_guard<std::mutex> lock(lengthened_mutex);
  std::size_t more = 0;
  if (lengthened_kind == static_cast<int>(kind)) {
    more = lengthened_bytes;
    lengthened_kind = -1;
  }
  return {to, room + more, from, bytes + more, kind};
}

}  // namespace fake_acl

using namespace fake_acl;

extern "C" {

void fake_acl_lengthen_next_copy(int kind, size_t bytes) {
  const std::lock_guard<std::mutex> lock(lengthened_mutex);
  lengthened_kind = kind;
  lengthened_bytes = bytes;
}

// Done before it returns, and in no order with any stream: what a stream has yet to write is not
// there.
aclError aclrtMemcpy(void* dst, size_t destMax, const void* src, size_t count,
                     aclrtMemcpyKind kind) {
  FAKE_ACL_COUNT_CALL();
  const Copy copy = requested_copy(dst, destMax, src, count, kind);
  const aclError error = copy.check(__func__);
  if (error != ACL_SUCCESS) return error;
  count_copy(copy);
  copy.run();
  return ACL_SUCCESS;
}

aclError aclrtMemcpyAsync(void* dst, size_t destMax, const void* src, size_t count,
                          aclrtMemcpyKind kind, aclrtStream stream) {
  FAKE_ACL_COUNT_CALL();
  const StreamRef found = find_stream(stream);
  if (found == nullptr) {
    return refuse(ACL_ERROR_INVALID_PARAM, "aclrtMemcpyAsync: unknown stream");
  }
  const Copy copy = requested_copy(dst, destMax, src, count, kind);
  const aclError error = copy.check(__func__);
  if (error != ACL_SUCCESS) return error;
  count_copy(copy);
  found->enqueue([copy] {
    const aclError late = copy.check("aclrtMemcpyAsync, when the stream came to it,");
    if (late == ACL_SUCCESS) copy.run();
    return late;
  });
  return ACL_SUCCESS;
}

aclError aclrtMemsetAsync(void* devPtr, size_t maxCount, int32_t value, size_t count,
                          aclrtStream stream) {
  FAKE_ACL_COUNT_CALL();
  const StreamRef found = find_stream(stream);
  if (found == nullptr) {
    return refuse(ACL_ERROR_INVALID_PARAM, "aclrtMemsetAsync: unknown stream");
  }
  if (count > maxCount) {
    return refuse(ACL_ERROR_INVALID_PARAM, "aclrtMemsetAsync: " + std::to_string(count) +
                                               " bytes do not fit into " +
                                               std::to_string(maxCount));
  }
  const aclError error = check_end("aclrtMemsetAsync: the destination", devPtr, count, true);
  if (error != ACL_SUCCESS) return error;
  found->enqueue([devPtr, count, value] {
    const aclError late = check_end("aclrtMemsetAsync, when the stream came to it: the destination",
                                    devPtr, count, true);
    if (late == ACL_SUCCESS) std::memset(device_memory().alias(devPtr), value, count);
    return late;
  });
  return ACL_SUCCESS;
}

}  // extern "C"
