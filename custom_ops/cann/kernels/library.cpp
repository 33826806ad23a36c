// The host's part of a kernel library: which layout its kernels were compiled with.
#include "launch.h"
#include "tq/codec_spec.h"

const char* tq_kernels_layout_digest(void) { return tq::spec::kLayoutDigest; }
