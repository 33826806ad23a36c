// Integer products of the level neondot.
#include "core/simd/level.h"
#include "core/simd/operands_i8_neondot.h"
#include "core/simd/integer.inl"

namespace tq {
const IntegerKernels* neondot_integers() { return &kIntegerKernels; }
}  // namespace tq
