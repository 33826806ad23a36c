// Kernels with floats of the levels avx512 and avx512vnni.
#include "core/simd/level.h"
#include "core/simd/vec_avx512.h"
#define TQ_PAIRS
#include "core/simd/kernels.inl"

namespace tq {
const Kernels* avx512_kernels() { return &kKernels; }
}  // namespace tq
