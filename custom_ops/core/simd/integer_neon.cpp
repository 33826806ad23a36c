// Integer products of the neon level, which every aarch64 has.
#if defined(__aarch64__) && defined(__GNUC__)

#include "core/kernels.h"

namespace {
constexpr int kNumberBits = 16;
}  // namespace

#include "core/simd/numbers_neon.h"
#include "core/simd/integer.inl"

namespace tq {
const IntegerKernels* neon_integers() { return &kIntegerKernels; }
}  // namespace tq

#else

#include "core/kernels.h"

namespace tq {
const IntegerKernels* neon_integers() { return nullptr; }
}  // namespace tq

#endif
