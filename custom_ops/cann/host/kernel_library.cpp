// Opening the kernel library; the contract is in kernel_library.h.
#include "cann/host/kernel_library.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <mutex>

#include "cann/host/aclnn.h"
#include "ort/tensor.h"
#include "tq/codec_spec.h"

namespace tq::cann {
namespace {

using ort::OpError;

// SoCs by the prefix of their names.
struct Soc {
  const char* begins;
  const char* name;
  int counted;     // the cores that kernels run on, as aclrtDevAttr: vector cores, or AI cores
  uint32_t least;  // of these, where the runtime cannot be asked
};

constexpr Soc kSocs[] = {
    {"Ascend910B", "ascend910b", 201, 40},
    {"Ascend910_93", "ascend910_93", 201, 40},
    {"Ascend310P", "ascend310p", 101, 8},
};

template <class Function>
void find(const char* op, void* library, const std::string& path, const char* name,
          Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  if (function == nullptr) {
    throw OpError(std::string(op) + ": " + path + " has no function " + name);
  }
}

// The provider loads the runtime with local scope, where dlsym(RTLD_DEFAULT) does not find it. With
// RTLD_NOLOAD, dlopen by name returns the loaded library and never loads another.
void* runtime(const char* op) {
  void* const library = dlopen(kAclRuntime, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) {
    throw OpError(std::string(op) + ": the ACL runtime " + kAclRuntime +
                  " is not loaded in this process, expected CANNExecutionProvider to have done so");
  }
  return library;
}

const Soc& soc_of(const char* op, void* acl) {
  const char* (*soc_name)() = nullptr;
  find(op, acl, kAclRuntime, "aclrtGetSocName", soc_name);
  const char* const given = soc_name();
  const std::string name = given == nullptr ? "" : given;
  for (const Soc& soc : kSocs) {
    if (name.rfind(soc.begins, 0) == 0) return soc;
  }
  throw OpError(std::string(op) + ": the device is '" + name +
                "', expected one of Ascend910B, Ascend910_93 and Ascend310P");
}

// Kernels distribute tasks over any number of cores: another number than that of the device changes the
// speed and no result. Older runtimes have no aclrtGetDeviceInfo.
uint32_t cores_of(const Soc& soc, void* acl) {
  constexpr int64_t kMost = 1024;
  const auto device_of = reinterpret_cast<int (*)(int32_t*)>(dlsym(acl, "aclrtGetDevice"));
  const auto ask =
      reinterpret_cast<int (*)(uint32_t, int, int64_t*)>(dlsym(acl, "aclrtGetDeviceInfo"));
  int32_t device = 0;
  int64_t cores = 0;
  if (device_of == nullptr || ask == nullptr || device_of(&device) != 0 || device < 0 ||
      ask(static_cast<uint32_t>(device), soc.counted, &cores) != 0 || cores < 1 || cores > kMost) {
    return soc.least;
  }
  return static_cast<uint32_t>(cores);
}

// The file that the user names, or "".
std::string named_file() {
  const char* const name = std::getenv(kLibraryVariable);
  return name == nullptr ? "" : name;
}

std::string path_of(const char* op, const Soc& soc) {
  const std::string name = named_file();
  if (!name.empty()) return name;
  Dl_info own{};
  if (dladdr(reinterpret_cast<const void*>(&kernel_library), &own) == 0) {
    throw OpError(std::string(op) + ": no folder is known to look for the kernel library in; name "
                  "the file in " + kLibraryVariable);
  }
  const std::string file = own.dli_fname;
  const size_t slash = file.rfind('/');
  const std::string folder = slash == std::string::npos ? "./" : file.substr(0, slash + 1);
  return folder + "libtq_kernels_" + soc.name + ".so";
}

// Kernels of another layout or interface would misread rows or their arguments.
void check_fit(const char* op, void* library, const std::string& path) {
  const char* (*digest)() = nullptr;
  uint32_t (*interface)() = nullptr;
  find(op, library, path, "tq_kernels_layout_digest", digest);
  const std::string theirs = digest(), but = std::string(op) + ": " + path;
  if (theirs != spec::kLayoutDigest) {
    throw OpError(but + " was built for row layout " + theirs + ", expected " +
                  spec::kLayoutDigest);
  }
  find(op, library, path, "tq_kernels_interface", interface);
  if (interface() == TQ_KERNELS_INTERFACE) return;
  throw OpError(but + " has kernels of interface " + std::to_string(interface()) + ", expected " +
                std::to_string(TQ_KERNELS_INTERFACE));
}

KernelLibrary load(const char* op, void* acl, const Soc& soc, const std::string& path) {
  KernelLibrary found{};
  found.path = path;
  found.soc = soc.begins;
  found.cores = cores_of(soc, acl);
  find(op, acl, kAclRuntime, "aclrtMemcpyAsync", found.copy);
  find(op, acl, kAclRuntime, "aclrtMemsetAsync", found.fill);
  find(op, acl, kAclRuntime, "aclrtSynchronizeStream", found.wait);
  // Stays open when it is refused: closing would run destructors of a library that is not ours.
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const reason = dlerror();
    found.missing = std::string("the kernel library for CANN cannot be opened (") +
                    (reason == nullptr ? path : reason) + "); build it as in "
                    "custom_ops/cann/kernels/README.md, or name it in " + kLibraryVariable;
    // What is there or named, and not usable, is not passed over in silence.
    if (!named_file().empty() || access(path.c_str(), F_OK) == 0) expect_kernels(op, found);
    return found;
  }
  check_fit(op, library, path);
#define TQ_FIND_LAUNCH(KERNEL, TILING) \
  find(op, library, path, "tq_launch_" #KERNEL, found.KERNEL);
  TQ_KERNELS(TQ_FIND_LAUNCH)
#undef TQ_FIND_LAUNCH
  return found;
}

}  // namespace

void expect_kernels(const char* op, const KernelLibrary& library, bool has_exact_planes) {
  if (library.has_kernels()) return;
  throw OpError(std::string(op) + ": " + library.missing +
                (has_exact_planes ? "; on a 910B or 910C a model without exact tokens "
                                    "(--residual-length 0 --sink-tokens 0) needs none"
                                  : ""));
}

const KernelLibrary& kernel_library(const char* op) {
  // Operators keep references, so entries live until the process ends. A failure is not cached: the
  // environment may name another file next time.
  static std::mutex mutex;
  static auto& libraries = *new std::map<std::string, KernelLibrary>;
  void* const acl = runtime(op);
  const Soc& soc = soc_of(op, acl);
  const std::string path = path_of(op, soc);
  const std::lock_guard<std::mutex> lock(mutex);
  const auto known = libraries.find(path);
  if (known != libraries.end()) return known->second;
  KernelLibrary loaded = load(op, acl, soc, path);
  // One that is missing may be there next time.
  const std::string key = path + (loaded.has_kernels() ? "" : "?");
  return libraries.emplace(key, std::move(loaded)).first->second;
}

}  // namespace tq::cann
