// Included first by the parts of a level (floats, integers, pairs, search), each a file with flags of
// its own. They use the same names for their vector operations.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__aarch64__) || defined(_M_ARM64)
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif

#include "core/kernels.h"
#include "core/lane_sums.h"
#include "core/simd/inline.h"
