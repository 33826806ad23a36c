// The avx2 level, compiled with its own flags (see CMakeLists.txt).
#include "core/simd/level.h"

#ifdef TQ_X86

namespace float_products {
#define TQ_LEVEL "avx2"
#include "core/simd/vec_avx2.h"
#include "core/simd/kernels.inl"
}  // namespace float_products

#ifdef TQ_INTEGERS
namespace integer_products {
#define TQ_LANES
#include "core/simd/operands_i8_avx2.h"
#include "core/simd/integer.inl"
#undef TQ_LANES
}  // namespace integer_products
#endif

namespace tq {

const Kernels* avx2_kernels() { return &float_products::kKernels; }

const IntegerKernels* avx2_integers() {
#ifdef TQ_INTEGERS
  return &integer_products::kIntegerKernels;
#else
  return nullptr;
#endif
}

}  // namespace tq

#endif
