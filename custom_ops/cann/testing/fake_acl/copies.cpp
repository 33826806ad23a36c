// Copies and fills: checked when they are asked for, and again when a stream comes to them, since a
// block may have been freed between.
#include <cstring>
#include <mutex>
#include <string>

#include "acl/acl_rt.h"
#include "counters.h"
#include "fake_acl.h"
#include "memory.h"
#include "streams.h"

using namespace fake_acl;

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

// What the next copy of a kind is longer by.
std::mutex lengthened_mutex;
int lengthened_kind = -1;
size_t lengthened_bytes = 0;

// One end of a copy, on the side that its direction says.
aclError check_end(const std::string& what, const void* address, size_t bytes, bool on_device) {
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

aclError check_room(const std::string& what, size_t bytes, size_t room) {
  if (bytes <= room) return ACL_SUCCESS;
  return refuse(ACL_ERROR_INVALID_PARAM, what + ": " + std::to_string(bytes) +
                                             " bytes do not fit into " + std::to_string(room));
}

void* reachable(const void* address) {
  void* const alias = device_memory().alias(address);
  return alias != nullptr ? alias : const_cast<void*>(address);
}

struct Copy {
  void* to;
  size_t room;  // at `to`
  const void* from;
  size_t bytes;
  aclrtMemcpyKind kind;

  // Refuses what leaves the room, the direction or a live block.
  aclError check(const std::string& caller) const {
    if (kind > ACL_MEMCPY_DEVICE_TO_DEVICE) {
      return refuse(ACL_ERROR_INVALID_PARAM, caller + ": unsupported kind of copy " +
                                                 std::to_string(static_cast<int>(kind)));
    }
    const Direction& direction = kDirections[kind];
    const std::string what = caller + " " + direction.name;
    aclError error = check_room(what, bytes, room);
    if (error == ACL_SUCCESS) {
      error = check_end(what + ": the destination", to, bytes, direction.to_device);
    }
    return error ? error : check_end(what + ": the source", from, bytes, direction.from_device);
  }
  void count() const {
    const std::string name = kDirections[kind].name;
    counters().add("copy." + name);
    counters().add("bytes." + name, bytes);
  }
  void run() const { std::memmove(reachable(to), reachable(from), bytes); }
};

Copy requested_copy(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind) {
  const std::lock_guard<std::mutex> lock(lengthened_mutex);
  size_t more = 0;
  if (lengthened_kind == static_cast<int>(kind)) {
    more = lengthened_bytes;
    lengthened_kind = -1;
  }
  return {to, room + more, from, bytes + more, kind};
}

// Enqueues `run`, with `check` of a caller now and then.
template <class Check, class Run>
aclError enqueue(const std::string& caller, aclrtStream stream, Check check, Run run) {
  const StreamRef found = find_stream(stream);
  if (found == nullptr) return refuse(ACL_ERROR_INVALID_PARAM, caller + ": unknown stream");
  const aclError error = check(caller);
  if (error != ACL_SUCCESS) return error;
  found->enqueue([=] {
    const aclError late = check(caller + ", when the stream came to it,");
    if (late == ACL_SUCCESS) run();
    return late;
  });
  return ACL_SUCCESS;
}

}  // namespace

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
  copy.count();
  copy.run();
  return ACL_SUCCESS;
}

aclError aclrtMemcpyAsync(void* dst, size_t destMax, const void* src, size_t count,
                          aclrtMemcpyKind kind, aclrtStream stream) {
  FAKE_ACL_COUNT_CALL();
  const Copy copy = requested_copy(dst, destMax, src, count, kind);
  const auto check = [copy](const std::string& caller) { return copy.check(caller); };
  const aclError error = enqueue(__func__, stream, check, [copy] { copy.run(); });
  if (error == ACL_SUCCESS) copy.count();
  return error;
}

aclError aclrtMemsetAsync(void* devPtr, size_t maxCount, int32_t value, size_t count,
                          aclrtStream stream) {
  FAKE_ACL_COUNT_CALL();
  const auto check = [=](const std::string& caller) {
    const aclError error = check_room(caller, count, maxCount);
    return error ? error : check_end(caller + ": the destination", devPtr, count, true);
  };
  const auto run = [=] { std::memset(device_memory().alias(devPtr), value, count); };
  return enqueue(__func__, stream, check, run);
}

}  // extern "C"
