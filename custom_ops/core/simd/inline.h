// Forced inlining, and a loop over compile-time constants, without the STL.
#pragma once

#if defined(_MSC_VER) && !defined(__clang__)
#define TQ_INLINE static __forceinline
#else
#define TQ_INLINE static inline __attribute__((always_inline))
#endif
