// The neondot level: integer products beside the kernels of neon, compiled with its own flags (see
// CMakeLists.txt).
#include "core/simd/level.h"

#ifdef TQ_ARM

#ifdef TQ_INTEGERS

#include "core/simd/operands_i8_neondot.h"
#include "core/simd/integer.inl"

namespace tq {
const IntegerKernels* neondot_integers() { return &kIntegerKernels; }
}  // namespace tq

#else

namespace tq {
const IntegerKernels* neondot_integers() { return nullptr; }
}  // namespace tq

#endif
#endif
