// Integer products of 8 bits of the avx512vnni level, compiled with its own flags (see CMakeLists.txt).
#if (defined(__x86_64__) || defined(_M_X64)) && (!defined(_MSC_VER) || defined(__clang__))

#include "core/kernels.h"
#include "core/simd/operands_i8_avx512.h"
#include "core/simd/integer.inl"

namespace tq {
const IntegerKernels* avx512vnni_integers() { return &kIntegerKernels; }
}  // namespace tq

#else

#include "core/kernels.h"

namespace tq {
const IntegerKernels* avx512vnni_integers() { return nullptr; }
}  // namespace tq

#endif
