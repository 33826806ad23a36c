// Kernels with floats of the levels avx2 and avxvnni.
#include "core/simd/level.h"
#include "core/simd/vec_avx2.h"
#include "core/simd/kernels.inl"

namespace tq {
const Kernels* avx2_kernels() { return &kKernels; }
}  // namespace tq
