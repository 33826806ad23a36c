// The avxvnni level: integer products beside the kernels of avx2, compiled with its own flags (see
// CMakeLists.txt).
#include "core/simd/level.h"

#ifdef TQ_X86

#if defined(TQ_INTEGERS) && defined(__AVXVNNI__) && !defined(TQ_WITHOUT_avxvnni)

#include "core/simd/operands_i8_avxvnni.h"
#include "core/simd/integer.inl"

namespace tq {
const IntegerKernels* avxvnni_integers() { return &kIntegerKernels; }
}  // namespace tq

#else

namespace tq {
const IntegerKernels* avxvnni_integers() { return nullptr; }
}  // namespace tq

#endif
#endif
