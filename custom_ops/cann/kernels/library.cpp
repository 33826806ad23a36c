// The kernel library in one file: every kernel, and the functions of launch.h that launch them.
//
//   bisheng -x asc -shared library.cpp -o LIBRARY -fPIC --npu-arch=dav-2201    (build.sh)
#include "launch.h"
#include "tq/codec_spec.h"
#include "tq_attention.cpp"
#include "tq_attention_merge.cpp"
#include "tq_encode.cpp"
#include "tq_rotary_embedding.cpp"

#ifndef TQ_ENQUEUE  // the shim of the tests has its own
// A launch returns nothing; what the runtime says of it is the thread's last error, which older
// runtimes do not keep.
extern "C" __attribute__((weak)) int aclrtGetLastError(int level);
inline uint32_t last_error() {
  constexpr int kOfThread = 0;
  return aclrtGetLastError == nullptr ? 0 : static_cast<uint32_t>(aclrtGetLastError(kOfThread));
}
#define TQ_ENQUEUE(KERNEL, CORES, STREAM, TILING) \
  (last_error(), KERNEL<<<CORES, 0, STREAM>>>(TILING), last_error())
#endif

const char* tq_kernels_layout_digest(void) { return tq::spec::kLayoutDigest; }

uint32_t tq_kernels_interface(void) { return TQ_KERNELS_INTERFACE; }

#define TQ_DEFINE_LAUNCH(KERNEL, TILING)                                               \
  uint32_t tq_launch_##KERNEL(uint32_t cores, void* stream, const TILING* tiling) { \
    return TQ_ENQUEUE(KERNEL, cores, stream, *tiling);                              \
  }
TQ_KERNELS(TQ_DEFINE_LAUNCH)
