// The table of kernels in terms of the lanes of one vec_*.h. Included once per instruction set, by
// a file that includes its vec_*.h first.
//
// No STL, no ORT, no inline function with external linkage (see core/kernels.h). Rows are never
// read beyond their own bytes: the last row of a cache may end at the end of its memory.

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

// body(Number<group>) for group in [1, LARGEST].
template <int LARGEST = kScoreGroup, class Body>
TQ_INLINE void with_group(int group, Body&& body) {
  if constexpr (LARGEST > 1) {
    if (group < LARGEST) return with_group<LARGEST - 1>(group, body);
  }
  body(Number<LARGEST>{});
}

}  // namespace

#include "core/simd/convert.inl"
#include "core/simd/encode.inl"
#include "core/simd/search.inl"
#include "core/simd/bytes.inl"
#include "core/simd/multiply.inl"
#include "core/simd/unpack.inl"
#include "core/simd/fused.inl"
#include "core/simd/decode.inl"
#include "core/simd/fused_bytes.inl"
#include "core/simd/softmax.inl"
#include "core/simd/rotary.inl"
#include "core/simd/prefill.inl"
#ifdef TQ_PAIRS
#include "core/simd/prefill_pairs.inl"
#else
namespace {
constexpr const tq::PairKernels* kPairs = nullptr;
}  // namespace
#endif

namespace {

constexpr tq::Kernels make_kernels() {
  tq::Kernels all{};
  all.lanes = kLanes;
  all.max_fused = kMaxFused;
  all.half_to_float = half_to_float;
  all.float_to_half = float_to_half;
  all.round_to_half = round_to_half;
  all.sum_squares = sum_squares;
  all.divide = divide;
  all.rotate = rotate;
  all.quantise = quantise;
  all.search = search;
  all.round_steps = round_steps;
  all.encode_fp8 = encode_fp8;
  all.multiply = multiply;
  all.load_fields = load_fields;
  all.load_field_pairs = load_field_pairs;
  all.score_rows = score_rows;
  all.accumulate_rows = accumulate_rows;
  all.decode_columns = decode_columns;
  all.decode_rows = decode_rows;
  all.decode_fp8 = decode_fp8;
  all.decode_int8 = decode_int8;
  all.transpose_block = transpose_block;
  all.finish_scores = finish_scores;
  all.weigh = weigh;
  all.scale = scale;
  all.add_scaled = add_scaled;
  all.add_rotary = add_rotary;
  all.attend_block = attend_block;
  all.pairs = kPairs;
  all.max_fused_bytes = kMaxFusedBytes;
  all.score_bytes = score_bytes;
  all.accumulate_bytes = accumulate_bytes;
  all.apply_fields = apply_fields;
  return all;
}

constexpr tq::Kernels kKernels = make_kernels();

}  // namespace
