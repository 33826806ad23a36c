// The neon level, which every aarch64 has.
#include "core/simd/level.h"

#ifdef TQ_ARM

namespace float_products {
#define TQ_LEVEL "neon"
#include "core/simd/vec_neon.h"
#include "core/simd/kernels.inl"
}  // namespace float_products

#ifdef TQ_INTEGERS
namespace integer_products {
#include "core/simd/operands_i16_neon.h"
#include "core/simd/integer.inl"
}  // namespace integer_products
#endif

namespace tq {

const Kernels* neon_kernels() { return &float_products::kKernels; }

const IntegerKernels* neon_integers() {
#ifdef TQ_INTEGERS
  return &integer_products::kIntegerKernels;
#else
  return nullptr;
#endif
}

}  // namespace tq

#endif
