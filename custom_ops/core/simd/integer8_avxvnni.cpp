// Integer products of 8 bits of the avxvnni level, compiled with its own flags (see CMakeLists.txt).
#if defined(__AVXVNNI__) && (!defined(_MSC_VER) || defined(__clang__))

#include "core/kernels.h"
#include "core/simd/operands_i8_avxvnni.h"
#include "core/simd/integer.inl"

namespace tq {
const IntegerKernels* avxvnni_integers() { return &kIntegerKernels; }
}  // namespace tq

#else

#include "core/kernels.h"

namespace tq {
const IntegerKernels* avxvnni_integers() { return nullptr; }
}  // namespace tq

#endif
