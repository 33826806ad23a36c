// Included first by each level_*.cpp. The parts of a level (floats, integers, pairs, search) are in
// namespaces, because they use the same names for their vector operations. Headers from outside of
// this folder must not be included inside a namespace, so they are here.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(TQ_SCALAR_ONLY)
#elif defined(__x86_64__) || defined(_M_X64)
#define TQ_X86
#include <immintrin.h>
#elif defined(__aarch64__) || defined(_M_ARM64)
#define TQ_ARM
#include <arm_neon.h>
#endif

// Integer products are written with inline assembly, or with names that only these compilers have.
#if defined(__GNUC__) || defined(__clang__)
#define TQ_INTEGERS
#endif

#include "core/kernels.h"
#include "core/lane_sums.h"
#include "core/simd/inline.h"
