// Kernels with floats of the levels neon and neondot.
#include "core/simd/level.h"
#include "core/simd/vec_neon.h"
#include "core/simd/kernels.inl"

namespace tq {
const Kernels* neon_kernels() { return &kKernels; }
}  // namespace tq
