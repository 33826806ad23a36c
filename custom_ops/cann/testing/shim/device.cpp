// The seam of device.h: blocks that tests registered are host memory, all else is asked of the fake
// ACL runtime, if the process has one.
#include "device.h"

#include <dlfcn.h>

#include <map>
#include <mutex>

#include "../fake_acl/fake_acl.h"

namespace shim {
namespace {

std::mutex& mutex() {
  static std::mutex m;
  return m;
}

std::map<uintptr_t, size_t>& blocks() {
  static std::map<uintptr_t, size_t> all;
  return all;
}

// This library links neither ACL nor the fake of it. The provider loads libascendcl.so for itself
// only, where RTLD_DEFAULT does not look; asking by name gives the one that is loaded already.
struct Runtime {
  decltype(fake_acl_is_live)* is_live;
  decltype(fake_acl_alias)* alias;
  decltype(fake_acl_enqueue)* enqueue;
};

template <typename F>
void find(void* library, const char* name, F*& function) {
  function = reinterpret_cast<F*>(dlsym(library, name));
}

// Null without a fake runtime; asked again then, since it may be loaded later.
const Runtime* runtime() {
  static const Runtime* known = nullptr;
  const std::lock_guard<std::mutex> lock(mutex());
  if (known != nullptr) return known;
  void* const library = dlopen("libascendcl.so", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  static Runtime found;
  find(library, "fake_acl_is_live", found.is_live);
  find(library, "fake_acl_alias", found.alias);
  find(library, "fake_acl_enqueue", found.enqueue);
  const bool is_fake = found.is_live && found.alias && found.enqueue;  // not the real one
  return known = is_fake ? &found : nullptr;
}

bool is_registered(const void* address, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex());
  const auto first = reinterpret_cast<uintptr_t>(address);
  auto block = blocks().upper_bound(first);
  if (block == blocks().begin()) return false;
  --block;
  const size_t offset = first - block->first;
  return offset <= block->second && bytes <= block->second - offset;
}

constexpr int kNoRuntime = 107003;  // ACL_ERROR_RT_STREAM_CONTEXT

}  // namespace

uint8_t* device_bytes(const void* address, size_t bytes) {
  if (is_registered(address, bytes)) {
    return static_cast<uint8_t*>(const_cast<void*>(address));
  }
  const Runtime* const fake = runtime();
  if (fake == nullptr || !fake->is_live(address, bytes)) return nullptr;
  return static_cast<uint8_t*>(fake->alias(address));
}

int enqueue(void* stream, const char* name, int (*task)(void*), void* argument) {
  if (stream == nullptr) return task(argument);  // at once, for tests without a runtime
  const Runtime* const fake = runtime();
  return fake == nullptr ? kNoRuntime : fake->enqueue(stream, name, task, argument);
}

}  // namespace shim

extern "C" {

// Tests without the fake runtime say what is device memory.
void tq_sim_register(void* address, size_t bytes) {
  const std::lock_guard<std::mutex> lock(shim::mutex());
  shim::blocks()[reinterpret_cast<uintptr_t>(address)] = bytes;
}

void tq_sim_unregister(void* address) {
  const std::lock_guard<std::mutex> lock(shim::mutex());
  shim::blocks().erase(reinterpret_cast<uintptr_t>(address));
}

}  // extern "C"
