// The part of the Ascend C API that the kernels use, written anew for g++, so that they run
// unmodified on a machine without an NPU. Test-only: it says what an instruction computes and
// refuses what the device would not do, as far as that is known without CANN at hand; it says
// nothing about time.
//
// Compile with -D__NPU_ARCH__=2201 or 2002; what that architecture has not is not declared.
#pragma once

#if !defined(__x86_64__) && !defined(__aarch64__)
#error "the shim needs _Float16"
#endif

#define __aicore__
#define __global__
#define __vector__
#define __gm__
#define GM_ADDR uint8_t*

#include "core.h"
#include "launch_queue.h"
#include "tensors.h"
#include "transfers.h"
#include "vectors.h"
