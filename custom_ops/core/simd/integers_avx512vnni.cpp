// Integer products of the level avx512vnni.
#include "core/simd/level.h"
#include "core/simd/operands_i8_avx512.h"
#include "core/simd/integer.inl"

namespace tq {
const IntegerKernels* avx512vnni_integers() { return &kIntegerKernels; }
}  // namespace tq
