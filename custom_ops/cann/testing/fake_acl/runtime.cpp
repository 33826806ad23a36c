// The device, its memory, streams and events as ACL calls them. Every handle is looked up before it
// is used; what a correct program never does is refused and counted as a violation.
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "acl/acl_rt.h"
#include "counters.h"
#include "fake_acl.h"
#include "memory.h"
#include "streams.h"

using namespace fake_acl;

namespace {

thread_local int32_t device_of_thread = -1;

aclError unknown(const char* caller, const char* what) {
  return refuse(ACL_ERROR_INVALID_PARAM, std::string(caller) + ": unknown " + what);
}

size_t copy_text(const std::string& from, char* text, size_t capacity) {
  if (capacity > 0) {
    const size_t length = from.size() < capacity ? from.size() : capacity - 1;
    std::memcpy(text, from.data(), length);
    text[length] = '\0';
  }
  return from.size();
}

// For programs that cannot ask in the process itself.
struct CountsFile {
  ~CountsFile() {
    const char* const path = std::getenv("TQ_FAKE_ACL_COUNTS");
    if (path != nullptr && *path != '\0') std::ofstream(path) << counters().json() << '\n';
  }
} counts_file;

}  // namespace

extern "C" {

// ---- what tests read

size_t fake_acl_counts_json(char* text, size_t capacity) {
  return copy_text(counters().json(), text, capacity);
}

uint64_t fake_acl_count(const char* name) { return counters().get(name); }
void fake_acl_reset_counts(void) { counters().reset(); }
uint64_t fake_acl_violations(void) { return counters().get("violations"); }

size_t fake_acl_last_violation(char* text, size_t capacity) {
  return copy_text(counters().last_violation(), text, capacity);
}

// ---- device

aclError aclInit(const char*) {
  FAKE_ACL_COUNT_CALL();
  return ACL_SUCCESS;
}

aclError aclFinalize() {
  FAKE_ACL_COUNT_CALL();
  return ACL_SUCCESS;
}

aclError aclrtSetDevice(int32_t deviceId) {
  FAKE_ACL_COUNT_CALL();
  if (deviceId != 0) {
    return refuse(ACL_ERROR_INVALID_DEVICE,
                  "aclrtSetDevice: there is one device, not number " + std::to_string(deviceId));
  }
  device_of_thread = deviceId;
  return ACL_SUCCESS;
}

// Not a violation: the provider asks while it writes a message, on any thread.
aclError aclrtGetDevice(int32_t* deviceId) {
  FAKE_ACL_COUNT_CALL();
  if (device_of_thread < 0) return ACL_ERROR_INVALID_DEVICE;
  *deviceId = device_of_thread;
  return ACL_SUCCESS;
}

aclError aclrtGetDeviceCount(uint32_t* count) {
  FAKE_ACL_COUNT_CALL();
  *count = 1;
  return ACL_SUCCESS;
}

const char* aclrtGetSocName() {
  FAKE_ACL_COUNT_CALL();
  static const std::string name = [] {
    const char* const chosen = std::getenv("TQ_FAKE_ACL_SOC");
    return std::string(chosen == nullptr || *chosen == '\0' ? "Ascend910B3" : chosen);
  }();
  return name.c_str();
}

aclError aclrtGetDeviceInfo(uint32_t deviceId, aclrtDevAttr attr, int64_t* value) {
  FAKE_ACL_COUNT_CALL();
  const std::string soc = aclrtGetSocName();
  const bool is_310p = soc.rfind("Ascend310P", 0) == 0;
  const bool is_large = soc == "Ascend910B1" || soc == "Ascend910B2";
  if (deviceId != 0) return refuse(ACL_ERROR_INVALID_DEVICE, "aclrtGetDeviceInfo: no such device");
  if (attr == ACL_DEV_ATTR_AICORE_CORE_NUM) {
    *value = is_310p ? 8 : is_large ? 24 : 20;
  } else if (attr == ACL_DEV_ATTR_VECTOR_CORE_NUM) {
    *value = is_310p ? 7 : is_large ? 48 : 40;
  } else {
    return unknown("aclrtGetDeviceInfo", "attribute");
  }
  return ACL_SUCCESS;
}

// ---- memory

aclError aclrtMalloc(void** devPtr, size_t size, aclrtMemMallocPolicy) {
  FAKE_ACL_COUNT_CALL();
  if (size == 0) return refuse(ACL_ERROR_INVALID_PARAM, "aclrtMalloc: 0 bytes");
  *devPtr = device_memory().allocate(size);
  if (*devPtr != nullptr) return ACL_SUCCESS;
  set_recent_error("aclrtMalloc: no room for " + std::to_string(size) + " bytes");
  return ACL_ERROR_BAD_ALLOC;
}

aclError aclrtFree(void* devPtr) {
  FAKE_ACL_COUNT_CALL();
  const std::string place = device_memory().describe(devPtr);
  if (device_memory().release(devPtr)) return ACL_SUCCESS;
  return refuse(ACL_ERROR_INVALID_PARAM, "aclrtFree: not the start of a live block: " + place);
}

aclError aclrtMallocHost(void** hostPtr, size_t size) {
  FAKE_ACL_COUNT_CALL();
  if (size == 0) return refuse(ACL_ERROR_INVALID_PARAM, "aclrtMallocHost: 0 bytes");
  *hostPtr = std::malloc(size);
  return *hostPtr != nullptr ? ACL_SUCCESS : ACL_ERROR_BAD_ALLOC;
}

aclError aclrtFreeHost(void* hostPtr) {
  FAKE_ACL_COUNT_CALL();
  if (device_memory().is_device(hostPtr, 1)) {
    return refuse(ACL_ERROR_INVALID_PARAM, "aclrtFreeHost: " + device_memory().describe(hostPtr));
  }
  std::free(hostPtr);
  return ACL_SUCCESS;
}

// ---- streams and events

aclError aclrtCreateStream(aclrtStream* stream) {
  FAKE_ACL_COUNT_CALL();
  *stream = streams().add(std::make_shared<Stream>());
  return ACL_SUCCESS;
}

aclError aclrtDestroyStream(aclrtStream stream) {
  FAKE_ACL_COUNT_CALL();
  const StreamRef found = streams().remove(stream);
  if (found == nullptr) return unknown(__func__, "stream");
  if (!found->is_idle()) counters().violation("a stream was destroyed before its tasks were done");
  return ACL_SUCCESS;
}

aclError aclrtSynchronizeStream(aclrtStream stream) {
  FAKE_ACL_COUNT_CALL();
  const StreamRef found = find_stream(stream);
  return found != nullptr ? found->synchronize() : unknown(__func__, "stream");
}

aclError aclrtSynchronizeDevice() {
  FAKE_ACL_COUNT_CALL();
  aclError first = ACL_SUCCESS;
  for (const StreamRef& stream : streams().all()) {
    const aclError error = stream->synchronize();
    if (first == ACL_SUCCESS) first = error;
  }
  return first;
}

// One that was not recorded is done.
aclError aclrtCreateEvent(aclrtEvent* event) {
  FAKE_ACL_COUNT_CALL();
  std::promise<void> done;
  done.set_value();
  *event = events().add(std::make_shared<Event>(done.get_future()));
  return ACL_SUCCESS;
}

aclError aclrtDestroyEvent(aclrtEvent event) {
  FAKE_ACL_COUNT_CALL();
  return events().remove(event) != nullptr ? ACL_SUCCESS : unknown(__func__, "event");
}

aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
  FAKE_ACL_COUNT_CALL();
  const StreamRef on = find_stream(stream);
  const auto done = std::make_shared<std::promise<void>>();
  if (on == nullptr || !events().set(event, std::make_shared<Event>(done->get_future()))) {
    return unknown(__func__, "event or stream");
  }
  on->enqueue([done] {
    done->set_value();
    return ACL_SUCCESS;
  });
  return ACL_SUCCESS;
}

aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
  FAKE_ACL_COUNT_CALL();
  const EventRef found = events().find(event);
  const StreamRef on = find_stream(stream);
  if (found == nullptr || on == nullptr) return unknown(__func__, "event or stream");
  on->enqueue([found] {
    found->wait();
    return ACL_SUCCESS;
  });
  return ACL_SUCCESS;
}

aclError aclrtSynchronizeEvent(aclrtEvent event) {
  FAKE_ACL_COUNT_CALL();
  const EventRef found = events().find(event);
  if (found == nullptr) return unknown(__func__, "event");
  found->wait();
  return ACL_SUCCESS;
}

}  // extern "C"
