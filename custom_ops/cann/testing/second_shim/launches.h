// Launches of the kernels on CANN's own headers, behind which this is included. TPipe begins where UB
// does, and must place every buffer where our shim does, which checks their number and room.
#pragma once

#include "../shim/launch_queue.h"

namespace AscendC {

class PlacedPipe : public TPipe {
 public:
  PlacedPipe() {
    const auto ub = reinterpret_cast<uintptr_t>(shim::core().ub());
    g_tpipeImpl.bufPool_[static_cast<uint8_t>(Hardware::UB)].maxAddr = static_cast<uint32_t>(ub);
  }

  template <TPosition P>
  void InitBuffer(TBuf<P>& buffer, uint32_t bytes) {
    TPipe::InitBuffer(buffer, bytes);
    const void* const place = buffer.template Get<uint8_t>().GetPhyAddr();
    if (shim::core().allocate(bytes) != place) shim::core().fail("TPipe has a buffer elsewhere");
  }
};

}  // namespace AscendC

#define TPipe PlacedPipe
#undef TQ_ENQUEUE
#define TQ_ENQUEUE(KERNEL, CORES, STREAM, TILING)                  \
  shim::launch(CORES, STREAM, #KERNEL, [tiling = TILING] {         \
    below::registers() = below::Registers();                       \
    KERNEL(tiling);                                                \
  })
