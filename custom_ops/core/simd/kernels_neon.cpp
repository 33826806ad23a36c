// The neon level, compiled with its own flags (see CMakeLists.txt).
#if defined(__aarch64__) || defined(_M_ARM64)

#define TQ_LEVEL "neon"
#include "core/simd/vec_neon.h"
#include "core/simd/kernels.inl"

namespace tq {
const Kernels* neon_kernels() { return &kKernels; }
}  // namespace tq

#else

#include "core/kernels.h"

namespace tq {
const Kernels* neon_kernels() { return nullptr; }
}  // namespace tq

#endif
