// The avx512vnni level: integer products, pairs and search beside the kernels of avx512, compiled with
// its own flags (see CMakeLists.txt).
#include "core/simd/level.h"

#if defined(TQ_X86) && !defined(TQ_WITHOUT_avx512vl)

namespace pair_products {
#include "core/simd/pairs_avx512vnni.inl"
}  // namespace pair_products

#ifdef TQ_INTEGERS
namespace integer_products {
#include "core/simd/operands_i8_avx512.h"
#include "core/simd/integer.inl"
}  // namespace integer_products
namespace search_of_bytes {
#include "core/simd/search_avx512vnni.inl"
}  // namespace search_of_bytes
#endif

namespace tq {

MultiplyPairs avx512vnni_multiply_pairs() { return pair_products::multiply_pairs; }

#ifdef TQ_INTEGERS
const IntegerKernels* avx512vnni_integers() { return &integer_products::kIntegerKernels; }
SearchBytes avx512vnni_search_bytes() { return search_of_bytes::search_bytes; }
#else
const IntegerKernels* avx512vnni_integers() { return nullptr; }
SearchBytes avx512vnni_search_bytes() { return nullptr; }
#endif

}  // namespace tq

#endif
