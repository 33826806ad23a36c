// Forced inlining, of functions and of lambdas. TQ_INLINE functions have internal linkage, so that
// no copy of one that was compiled for a wide instruction set can serve another file (see
// core/kernels.h).
#pragma once

#include <string.h>

#if defined(_MSC_VER) && !defined(__clang__)
#define TQ_INLINE static __forceinline
#define TQ_INLINED
#else
#define TQ_INLINE static inline __attribute__((always_inline))
#define TQ_INLINED __attribute__((always_inline))
#endif

// Before a loop whose body shall be compiled once.
#if defined(__clang__)
#define TQ_ROLLED _Pragma("clang loop unroll(disable)")
#elif defined(__GNUC__)
#define TQ_ROLLED _Pragma("GCC unroll 1")
#else
#define TQ_ROLLED
#endif

TQ_INLINE float float_of_bits(unsigned bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
