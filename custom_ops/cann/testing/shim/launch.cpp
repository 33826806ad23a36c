// The simulated kernel library: the unmodified kernels, and the entry points that the build of
// Ascend makes of them (launch.h).
#include "kernel_operator.h"
#include "launch_queue.h"

#include "../../kernels/launch.h"
#include "../../kernels/library.cpp"
#include "../../kernels/tq_attention.cpp"
#include "../../kernels/tq_attention_merge.cpp"
#include "../../kernels/tq_encode.cpp"
#include "../../kernels/tq_rms_normalization.cpp"
#include "../../kernels/tq_rotary_embedding.cpp"
#include "../../kernels/tq_swish.cpp"
#include "../../kernels/tq_transpose.cpp"

#define SHIM_LAUNCH(KERNEL, TILING)                                                            \
  uint32_t aclrtlaunch_##KERNEL(uint32_t cores, void* stream, const TILING* tiling) {          \
    return shim::launch(cores, stream, #KERNEL, [tiling = *tiling] { KERNEL(tiling); });       \
  }

extern "C" {
TQ_KERNELS(SHIM_LAUNCH)
}
