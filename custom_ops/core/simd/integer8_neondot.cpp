// Integer products of 8 bits of the neondot level, compiled with its own flags (see CMakeLists.txt).
#if defined(__aarch64__) && defined(__GNUC__)

#include "core/kernels.h"
#include "core/simd/operands_i8_neondot.h"
#include "core/simd/integer.inl"

namespace tq {
const IntegerKernels* neondot_integers() { return &kIntegerKernels; }
}  // namespace tq

#else

#include "core/kernels.h"

namespace tq {
const IntegerKernels* neondot_integers() { return nullptr; }
}  // namespace tq

#endif
