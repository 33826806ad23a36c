// Integer products of the levels avx2 and avx512.
#include "core/simd/level.h"
#define TQ_LANES
#include "core/simd/operands_i8_avx2.h"
#include "core/simd/integer.inl"

namespace tq {
const IntegerKernels* avx2_integers() { return &kIntegerKernels; }
}  // namespace tq
