// The ABI of a kernel library: what a host that opened it with dlopen looks up by name. No header of
// CANN is needed, a stream is a void*.
//
// library.cpp has tq_launch_<kernel> of each kernel, on a device and in the shim of the tests. They
// copy the arguments (tiling.h), enqueue a launch on `cores` vector cores, 1 at least, without memory
// of their own, and return 0, or an error of the runtime.
#pragma once

#include "tiling.h"

// Every kernel, and the struct of its arguments.
#define TQ_KERNELS(KERNEL)                                     \
  KERNEL(tq_encode_float32, TqEncodeTiling)                    \
  KERNEL(tq_encode_float16, TqEncodeTiling)                    \
  KERNEL(tq_attention_float32, TqAttentionTiling)              \
  KERNEL(tq_attention_float16, TqAttentionTiling)              \
  KERNEL(tq_attention_merge_float32, TqAttentionTiling)        \
  KERNEL(tq_attention_merge_float16, TqAttentionTiling)        \
  KERNEL(tq_rotary_embedding_float32, TqRotaryEmbeddingTiling) \
  KERNEL(tq_rotary_embedding_float16, TqRotaryEmbeddingTiling)

template <class Tiling>
using TqLaunch = uint32_t(uint32_t cores, void* stream, const Tiling* tiling);

extern "C" {

// The digest of the row layout that the kernels were compiled with (tq/codec_spec.h); a host with
// another refuses the library.
const char* tq_kernels_layout_digest(void);

// The number of this interface, raised whenever arguments change; a host with another refuses the
// library.
#define TQ_KERNELS_INTERFACE 9
uint32_t tq_kernels_interface(void);

#define TQ_DECLARE_LAUNCH(KERNEL, TILING) TqLaunch<TILING> tq_launch_##KERNEL;
TQ_KERNELS(TQ_DECLARE_LAUNCH)
#undef TQ_DECLARE_LAUNCH

}  // extern "C"
