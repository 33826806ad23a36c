// Integer products of the level avxvnni.
#include "core/simd/level.h"
#include "core/simd/operands_i8_avxvnni.h"
#include "core/simd/integer.inl"

namespace tq {
const IntegerKernels* avxvnni_integers() { return &kIntegerKernels; }
}  // namespace tq
