// The avx2 level, compiled with its own flags (see CMakeLists.txt).
#if defined(__x86_64__) || defined(_M_X64)

#define TQ_LEVEL "avx2"
#include "core/simd/vec_avx2.h"
#include "core/simd/kernels.inl"

namespace tq {
const Kernels* avx2_kernels() { return &kKernels; }
}  // namespace tq

#else

#include "core/kernels.h"

namespace tq {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace tq

#endif
