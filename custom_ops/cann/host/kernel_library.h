// The kernel library of the SoC that this process runs on, and the few functions of the ACL runtime
// that the operators need. Both are looked up at run time: no header of CANN is included, and
// nothing of it is linked to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cann/kernels/launch.h"

namespace tq::cann {

// Names another file in place of libtq_kernels_<soc>.so beside this library, where <soc> is
// ascend910b, ascend910_93 (910C) or ascend310p.
inline constexpr const char* kLibraryVariable = "TQ_ONNX_CANN_KERNELS";

struct KernelLibrary {
  std::string path;
  const char* soc;  // the beginning of its name
  uint32_t cores;   // the most that a launch is spread over
#define TQ_LAUNCH_MEMBER(KERNEL, TILING) TqLaunch<TILING>* KERNEL;
  TQ_KERNELS(TQ_LAUNCH_MEMBER)
#undef TQ_LAUNCH_MEMBER
  std::string missing;  // why there are no kernels; "" where there are
  bool has_kernels() const { return missing.empty(); }
  // Enqueue a copy within the device, and a fill with one byte; 0 or an error of the runtime.
  int (*copy)(void* to, size_t room, const void* from, size_t bytes, int kind, void* stream);
  int (*fill)(void* to, size_t room, int32_t byte, size_t bytes, void* stream);
  int (*wait)(void* stream);  // until the stream is idle
};

// Opened by the first caller and kept as long as the process. Throws OpError, with the name of the
// operator, for: no ACL runtime in the process, another SoC, a library that is named and missing, a
// function in it that is missing, kernels for another row layout or with another interface. Where no
// library is beside this one, there are no kernels, and CANN's own operators may do (vendor.h).
const KernelLibrary& kernel_library(const char* op);
// Throws OpError if there are none.
void expect_kernels(const char* op, const KernelLibrary& library, bool has_exact_planes = false);

}  // namespace tq::cann
