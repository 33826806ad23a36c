// The avx512 level, compiled with its own flags (see CMakeLists.txt).
#if defined(__x86_64__) || defined(_M_X64)

#define TQ_LEVEL "avx512"
#define TQ_PAIRS
#include "core/simd/vec_avx512.h"
#include "core/simd/kernels.inl"

namespace tq {
const Kernels* avx512_kernels() { return &kKernels; }
}  // namespace tq

#else

#include "core/kernels.h"

namespace tq {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace tq

#endif
