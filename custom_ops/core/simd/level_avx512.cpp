// The avx512 level, compiled with its own flags (see CMakeLists.txt).
#include "core/simd/level.h"

#if defined(TQ_X86) && !defined(TQ_WITHOUT_avx512vl)

#define TQ_LEVEL "avx512"
#define TQ_PAIRS
#include "core/simd/vec_avx512.h"
#include "core/simd/kernels.inl"

namespace tq {
const Kernels* avx512_kernels() { return &kKernels; }
}  // namespace tq

#endif
