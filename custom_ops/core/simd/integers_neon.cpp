// Integer products of the level neon.
#include "core/simd/level.h"
#include "core/simd/operands_i16_neon.h"
#include "core/simd/integer.inl"

namespace tq {
const IntegerKernels* neon_integers() { return &kIntegerKernels; }
}  // namespace tq
