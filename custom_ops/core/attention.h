// TurboQuantDequantAttention without ONNX Runtime.
#pragma once

#include "core/attention_call.h"
#include "core/kernels.h"
#include "core/parallel.h"

namespace tq {

// Works in the rotated space: <q, x'> = s <qR, c[idx]>, and the weighted sum of the values is
// un-rotated once. The result depends on the shapes and the instruction set, not on the threads.
// False when there was no memory for the work areas.
bool attention(const Kernels& kernels, const AttentionCall& call, const Parallel& parallel);

}  // namespace tq
