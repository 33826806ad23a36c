// The host's part of a kernel library: which layout and interface its kernels have.
#include "launch.h"
#include "tq/codec_spec.h"

const char* tq_kernels_layout_digest(void) { return tq::spec::kLayoutDigest; }

uint32_t tq_kernels_interface(void) { return TQ_KERNELS_INTERFACE; }
