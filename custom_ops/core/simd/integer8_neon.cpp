// Integer products of 8 bits of the neon level, which every aarch64 has.
#if defined(__aarch64__) && defined(__GNUC__)

#include "core/kernels.h"
#include "core/simd/operands_i16_neon.h"
#include "core/simd/integer.inl"

namespace tq {
const IntegerKernels* neon_integers() { return &kIntegerKernels; }
}  // namespace tq

#else

#include "core/kernels.h"

namespace tq {
const IntegerKernels* neon_integers() { return nullptr; }
}  // namespace tq

#endif
