// The table of kernels in terms of the lanes of one vec_*.h. Included once per instruction set, by
// a file that includes its vec_*.h first and defines TQ_LEVEL, the level's name.
//
// No STL, no ORT, no inline function with external linkage (see core/kernels.h). Rows are never
// read beyond their own bytes: the last row of a cache may end at the end of its memory.

#include "core/kernels.h"

namespace {

using tq::kBlock;
using tq::kPartialSums;
using tq::kPrefillBlock;
using tq::PrefillBlock;
using tq::RowFormat;

TQ_INLINE int smaller(int a, int b) { return a < b ? a : b; }
TQ_INLINE V load_up_to(const float* p, int n) { return n >= kLanes ? load(p) : load_n(p, n); }

template <int N>
struct Number {
  static constexpr int value = N;
};

}  // namespace

#include "core/simd/convert.inl"
#include "core/simd/encode.inl"
#include "core/simd/bytes.inl"
#include "core/simd/multiply.inl"
#include "core/simd/unpack.inl"
#include "core/simd/fused.inl"
#include "core/simd/decode.inl"
#include "core/simd/fused_bytes.inl"
#include "core/simd/softmax.inl"
#include "core/simd/prefill.inl"
#ifdef TQ_PAIRS
#include "core/simd/prefill_pairs.inl"
#else
namespace {
constexpr const tq::PairKernels* kPairs = nullptr;
}  // namespace
#endif

namespace {

constexpr tq::Kernels kKernels = {
    TQ_LEVEL,
    kLanes,
    kMaxFused,
    half_to_float,
    float_to_half,
    sum_squares,
    divide,
    rotate,
    quantise,
    round_steps,
    encode_fp8,
    multiply,
    load_fields,
    score_rows,
    accumulate_rows,
    decode_columns,
    decode_rows,
    decode_fp8,
    decode_int8,
    transpose_block,
    finish_scores,
    weigh,
    scale,
    nullptr,
    attend_block,
    kPairs,
    nullptr,
    kMaxFusedBytes,
    score_bytes,
    accumulate_bytes,
    apply_fields,
};

}  // namespace
