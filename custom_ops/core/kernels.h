// The table of inner loops that one instruction set provides.
//
// Included by the files that are compiled for one instruction set each, so it must hold no inline
// function and no STL or ORT header: the linker could keep the copy of such a function that was
// compiled with the widest instructions and run it on every machine.
//
// Vectors in "slot order". A byte of the narrowest plane of a row holds `slots` coordinates:
// i, i + slot_size, i + 2 * slot_size, ... A vector in slot order has its coordinates at
// [slot * padded_slot + i]; padded_slot is slot_size rounded up to the lanes of the instruction set
// and the padding of a query is zero. Where no padding is needed it is the natural order.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "core/prefill_kernels.h"

namespace tq {

// Tokens per block of the online softmax; a multiple of every instruction set's lanes.
constexpr int kBlock = 128;

// Rows between what integer products read and what they prefetch.
constexpr int kRowsAhead = 256;
constexpr int kCacheLine = 64;  // bytes that a processor reads at once

// What a kernel prefetches while it works, spread evenly over the work: a processor drops requests
// that come faster than memory answers. None where `bytes` is 0.
struct PrefetchRange {
  const uint8_t* begin;
  ptrdiff_t bytes;
};

// Length of a table of centroids as the kernels want it: repeated until it has 32 entries, so that
// bits above the code need not be masked away. Codes of up to 4 bits look at the first 16 only.
constexpr int kTable = 32;

// Tokens that a prefill decodes at a time.
constexpr int kPrefillBlock = 128;

// Partial sums of a sum of squares; the same at every level, so that every level rounds the same.
constexpr int kPartialSums = 16;

// Most gains that an encoder tries.
constexpr int kMaxGains = 16;

// What an encoder that searches has (tq_onnx/codec/search.py).
struct SearchTables {
  const float* gains;  // in the order of preference
  int count;  // at most kMaxGains
  const float* boundaries;
  int levels;
  const float* table;  // kTable centroids
  const float* numbers;  // the same over `unit`: whole numbers up to 127, or centroids and 1
  float unit;
  // The least <u, c> that is worth something: minus infinity where scales may be negative.
  float least_product = 0.0f;
};

// What <c, c> is at least divided by: codes that are all 0 are worth nothing.
constexpr float kLeastSquare = 1e-30f;

// Steps that the largest factor of a column of error feedback is.
constexpr int kFeedbackSteps = 127;
// Columns of a block of bytes; and the byte of the number 0, where numbers have no sign.
constexpr int kFeedbackColumns = 16, kFeedbackZero = 128;

// The moments of the queries of one KV head, L diag(h) L^T; L in whole steps of its columns. Arrays
// of columns have zeros up to a multiple of kFeedbackColumns.
struct Feedback {
  const float* lower;  // [D, D] below the diagonal; null where there are bytes
  // Four rows i of one column j after the other: [j / 16][i / 4][j % 16][i % 4], else null.
  const int8_t* bytes;
  const int32_t* starts;  // - kFeedbackZero times the sum of a column of bytes
  const float* steps;
  const float* weights;  // h
};

// The codes c that stay, and products of them with the vector u, in the moments of the queries.
struct Found {
  float own;  // <u, u>; 1 without feedback
  float product;  // <u, c>
  float square;  // <c, c>
};

using SearchBytes = void (*)(const SearchTables& tables, const Feedback* feedback, const float* y,
                             int rows, int size, uint8_t* codes, Found* found);

// Packed codes of one cache as the kernels see them.
struct RowFormat {
  int bits;  // of a code: 1 to 5 in planes, or 8: a byte each
  int head_size;
  int slots;
  int slot_size;
  int padded_slot;
  int padded;  // slots * padded_slot
  int high_plane;  // byte offset of the second plane (3 and 5 bits only)
  int stride;  // bytes from one row to the next
  // Up to here kernels may read what lies behind codes, less than a cache line; null where they may
  // read nothing behind the codes of the last row.
  const uint8_t* end;
};

// Centroids as integers: centroid i is unit * entries[i], repeated as in a table of floats.
struct IntegerTable {
  int8_t entries[kTable];
  float unit;
  int largest;  // magnitude of an entry
};

// Coordinates of all slots, each rounded up to whole words.
constexpr int kMaxIntegerWidth = 576;

// Floats that a row of a block of integers takes.
constexpr int kOperandFloats = kBlock / 2 + 4;

// Numbers of 8 bits, the same at every level: a query is rounded to 127ths of its largest, weights
// to 255ths of the largest of kByteStepRows of them.
constexpr float kLargestByte = 127.0f;
constexpr float kLargestByteWeight = 255.0f;
constexpr int kByteStepRows = 64;

// A level that adds products in lanes of 16 bits has steps so large that no sum can leave them: see
// core/lane_sums.h. So many rows share a step of weights.
constexpr int kLaneStepRows = 32;

// What weights are multiplied with before they are rounded: kBlock scales of each part of the rows,
// one part after the other. Their numbers are so many floats apart, and are multiplied with integers
// up to `largest`.
constexpr int kMaxParts = 2;
struct PartScales {
  const float* scales;
  int parts;  // at most kMaxParts
  ptrdiff_t pitch;
  int largest[kMaxParts];
};

// Products with integers. Numbers that are multiplied with codes are rounded to 8 bits: steps of the
// largest of their row or block.
struct IntegerKernels {
  bool has_lanes;  // adds products in lanes of 16 bits
  // Of what a block prefetches of keys while it scores, and of values in the softmax; the rest with the
  // fields of keys, and while it adds values. About as the time is, since processors drop requests
  // that come faster than memory answers.
  float key_share, softmax_share;
  int (*query_floats)(const RowFormat& format);  // of a prepared query row
  int (*sums_floats)(const RowFormat& format);  // of a row of sums
  void (*prepare_query)(const RowFormat& format, const IntegerTable& table, const float* natural,
                        float* prepared);
  // scores[r][t] = <query[r], centroids of row t>, leading dimensions `pitch` and kBlock; not a
  // number where query[r] is not finite. May write up to the next multiple of 32 behind count.
  void (*score_rows)(const RowFormat& format, const uint8_t* rows, int count,
                     const IntegerTable& table, const float* prepared, int pitch, int queries,
                     float* scores, PrefetchRange prefetch);
  // One row of a block of weights as integers, kOperandFloats long; weights are zero from count to
  // a multiple of the lanes. They are multiplied with integers up to `largest`. False, and the integers
  // zeros, where one is negative or not finite.
  bool (*quantise_weights)(const float* weights, int count, int largest, float* operands);
  // The online softmax of rows of a whole block that have no shift, cap, bias or hidden key, from
  // scores without the keys' scales to integers. exponentials[r] is the sum of the exponentials;
  // maxima[r] rises to that of the block if it is larger. NaN, and nothing done for the row, where
  // a weight is none.
  void (*softmax_block)(const float* scores, int rows, const float* key_scales,
                        const PartScales& value_scales, float* maxima, float* exponentials,
                        float* operands, PrefetchRange prefetch);
  // The same of one row, of keys and values that have zeros, arrays of kBlock that are zero where
  // a cache has none: a score is scores * key_scales + query_sum * key_zeros, and `zeros` becomes
  // the sum of the exponentials times value_zeros. Returns the sum of the exponentials, or NaN.
  float (*softmax_block_zeros)(const float* scores, const float* key_scales, const float* key_zeros,
                               float query_sum, const PartScales& value_scales,
                               const float* value_zeros, float* maximum, float* operands,
                               float* zeros);
  // Whether of a whole block any scores[r][t] * key_scales[t] is at least limits[r], or no number.
  bool (*any_reaches)(const float* scores, int rows, const float* key_scales, const float* limits);
  // sums[r] += sum over t of operands[r][t] * centroids of row t, in an order of their own; leading
  // dimension `pitch`.
  void (*accumulate_rows)(const RowFormat& format, const uint8_t* rows, int count,
                          const IntegerTable& table, const float* operands, int queries,
                          float* sums, int pitch, PrefetchRange prefetch);
  void (*natural_sums)(const RowFormat& format, const float* sums, float* natural);
  // The other way; what is no coordinate becomes zero.
  void (*ordered_sums)(const RowFormat& format, const float* natural, float* sums);
};

// Coordinates that lie one after the other.
enum class Coordinate { kFp8, kInt8, kFloat, kHalf, kBfloat };

// Coordinates of kInt8 that share a scale, a float16.
constexpr int kScaleBlock = 32;

struct ByteFormat {
  Coordinate kind;
  int bytes;  // of a coordinate
  int head_size;
  int padded;  // head_size rounded up to the lanes
  int scales;  // byte offset of the scales of kInt8
  int stride;  // bytes from one row to the next
};

// Half a block of the cosines of frequencies, or of their sines, from the middle on. Slow ones have
//   wave_i(u) = sum_k weights[k][i] vectors[k][u],  u = 0 .. kBlock / 2 - 1,  k = 0 .. rank - 1
// and behind these vectors are the waves of the fast ones.
struct RotaryBasis {
  const float *vectors, *weights;
  const int* begins;  // of weights, those before are zero; rising
  int rank;  // up to the next multiple of 4 there are weights, which are zero
};
constexpr int kRotaryLanes = 16;
constexpr int kMaxFrequencies = 512;
struct RotaryBlock {
  RotaryBasis basis[2];  // of cosines and of sines
  int width;  // of all frequencies, a multiple of kRotaryLanes
  int slow, fast;  // frequencies; weights are zero behind the slow ones
};

struct Kernels {
  const char* name;
  int lanes;
  int max_fused;  // query rows up to which score_rows and accumulate_rows beat decoding to memory

  // ---- conversions between float16 bits and float; float_to_half rounds to nearest even.
  void (*half_to_float)(const uint16_t* in, float* out, size_t count);
  void (*float_to_half)(const float* in, uint16_t* out, size_t count);
  // out[i] = in[i] as float16 holds it; false, and nothing said of `out`, where one is larger than
  // float16 can hold, or no number.
  bool (*round_to_half)(const float* in, float* out, size_t count);

  // ---- encode: the same bits at every level.
  // Sum of squares: partial sum i collects x[i], x[i + 16], ... by fused multiply-add; then a tree.
  float (*sum_squares)(const float* x, int size);
  void (*divide)(const float* x, float divisor, float* out, int size);
  // y[r] = x[r] M, leading dimensions ldx, ldm and ldy: y[r][j] accumulates x[r][i] * M[i][j] over
  // i = 0, 1, ..., inner - 1 by fused multiply-add.
  void (*rotate)(const float* x, int ldx, const float* matrix, int ldm, float* y, int ldy, int rows,
                 int inner, int width);
  // codes[j] = number of boundaries <= y[j]; returns the sum of squares of the chosen centroids.
  float (*quantise)(const float* y, const float* boundaries, int levels, const float* table,
                    uint8_t* codes, int size);
  // The codes of the best gain of each vector y[r], the first that has the largest
  // max(product, 0)^2 / square. Each gain has sums of its own, by fused multiply-add.
  // Without feedback (null), over j = 0, 1, ...:
  //   code = number of boundaries <= g y[j], c its centroid, product += c y[j], square += c c
  // With it, one of each vector, in units of the table, from the last j to the first:
  //   v = y[j] + step (sum of y[i] L[i][j]),  w = sum of L[i][j] k[i],  i = size - 1, ..., j + 1
  //   code = number of boundaries <= g v - (step unit) w, k its number
  //   q = k + step w,  product += (h v) q,  square += (h q) q
  // and own the sum of (h v) v by kPartialSums partial sums; k is exact where numbers are whole.
  void (*search)(const SearchTables& tables, const Feedback* feedback, const float* y, int rows,
                 int size, uint8_t* codes, Found* found);
  // The same of feedback that has bytes, and numbers that are whole; null where the level has none.
  SearchBytes search_bytes;
  // codes[j] = the low byte of (x[j] - zero) / scale rounded, ties to even, within [low, high].
  void (*round_steps)(const float* x, float zero, float scale, float low, float high,
                      uint8_t* codes, int size);
  // E4M3FN, to nearest, ties to even, saturating; x is finite.
  void (*encode_fp8)(const float* x, uint8_t* codes, int size);

  // ---- attention.
  // c[m][n] (+)= a[m][k] b[k][n]; n is a multiple of the lanes.
  void (*multiply)(const float* a, int lda, const float* b, int ldb, float* c, int ldc, int m,
                   int n, int k, bool accumulate);
  // out[t] = the float16 at at[t * stride], zero from count to kBlock.
  void (*load_fields)(const uint8_t* at, int stride, int count, float* out);
  // Of two neighbouring fields each.
  void (*load_field_pairs)(const uint8_t* at, int stride, int count, float* first, float* second);
  // scores[r][t] = <query[r], centroids of row t>, without the row's scale; queries <= max_fused. May
  // write up to the next multiple of four behind count.
  void (*score_rows)(const RowFormat& format, const uint8_t* rows, int count, const float* table,
                     const float* query, int queries, float* scores);
  // sums[r] += sum over t of weights[r][t] * centroids of row t; queries <= max_fused.
  void (*accumulate_rows)(const RowFormat& format, const uint8_t* rows, int count,
                          const float* table, const float* weights, int queries, float* sums);
  // keys[j][t] = coordinate j of row t, leading dimension kBlock, zero up to a multiple of lanes.
  void (*decode_columns)(const RowFormat& format, const uint8_t* rows, int count,
                         const float* table, float* keys);
  // values[t][j] = coordinate j of row t, leading dimension format.padded.
  void (*decode_rows)(const RowFormat& format, const uint8_t* rows, int count, const float* table,
                      float* values);
  // Floats of rows that have a byte per coordinate.
  void (*decode_fp8)(const uint8_t* codes, float* out, int size);
  void (*decode_int8)(const uint8_t* codes, float scale, float* out, int size);
  // columns[j][t] = rows[t][j], leading dimensions kBlock and width; width is a multiple of the
  // lanes; zero for t from count up to a multiple of the lanes.
  void (*transpose_block)(const float* rows, int count, int width, float* columns);
  // Scales, shifts (unless null), caps, biases and hides one row of a block of scores; positions
  // outside [low, high) and those whose bias is <= hide become -infinity. Arrays are kBlock long.
  // Returns the maximum, NaN ignored.
  float (*finish_scores)(float* scores, const float* key_scales, const float* shift,
                         const float* bias, float hide, float softcap, int count, int low,
                         int high);
  // scores -> exp(score - max) * value_scale, exactly zero where the score is -infinity; returns
  // the sum of the exponentials. Positions from count to a multiple of lanes become zero.
  float (*weigh)(float* scores, const float* value_scales, int count, float max);
  void (*scale)(float* x, float factor, int size);
  // x[t] = x[t] * by[t] + other[t] * other_by[t], each step rounded; may go on to the next multiple
  // of the lanes behind count.
  void (*add_scaled)(float* x, const float* by, const float* other, const float* other_by,
                     int count);
  const IntegerKernels* integers;  // null where the level has none

  // ---- prefill; null at the scalar level.
  // One step of the online softmax of query rows that see the tokens [low[r], high[r]) of the block
  // and nothing but scaled scores: updates max, weight (the sum of the exponentials) and sums.
  void (*attend_block)(const PrefillBlock& block, const float* query, int rows, const int* low,
                       const int* high, float* max, float* weight, float* sums);
  const PairKernels* pairs;  // null where the level has none
  MultiplyPairs multiply_pairs;  // likewise

  // ---- attention with few query rows, of rows that are bytes or floats.
  int max_fused_bytes;  // query rows up to which these beat decoding to memory
  // scores[r][t] = <query[r], row t>, leading dimensions padded and kBlock; may write up to the
  // next multiple of four behind count.
  void (*score_bytes)(const ByteFormat& format, const uint8_t* rows, int count, const float* query,
                      int queries, float* scores);
  // sums[r] += sum over t of weights[r][t] * row t, leading dimensions padded and kBlock. A weight
  // of zero adds nothing, even of a row that is not finite.
  void (*accumulate_bytes)(const ByteFormat& format, const uint8_t* rows, int count,
                           const float* weights, int queries, float* sums);
  // out[t] = weights[t] * scales[t], zero where the weight is zero; returns the sum of
  // weights[t] * zeros[t], likewise, 0 where `zeros` is null. Arrays have kBlock floats; weights
  // from count to a multiple of the lanes are zero.
  float (*apply_fields)(const float* weights, const float* scales, const float* zeros, int count,
                        float* out);

  // ---- offsets that turn (core/rotary_offset.h).
  // Scores of blocks by query row: scores[r][t] = scores[r][t] * key_scales[t] + sum over frequencies
  // of a cos(x) + b sin(x), x the angle of slot t. Pairs of a and b [2, width] are those of the middle
  // of a block at slot 0, `pitch` floats from row to row; angles are cosines and sines [2, width] of
  // the first slot. Whole blocks, whatever lies in them. Prefetches `later`.
  void (*add_rotary)(const RotaryBlock& block, const float* angles, const float* pairs,
                     ptrdiff_t pitch, int rows, const float* key_scales, float* scores,
                     PrefetchRange later);
};

// What the files of core/simd provide, those that CMakeLists.txt has chosen.
const Kernels* scalar_kernels();
const IntegerKernels* scalar_integers();
const IntegerKernels* scalar_lane_integers();  // with the steps of levels that have lanes
const Kernels* avx2_kernels();
const IntegerKernels* avx2_integers();
const IntegerKernels* avxvnni_integers();  // beside the kernels of avx2
const Kernels* avx512_kernels();
const IntegerKernels* avx512vnni_integers();  // beside the kernels of avx512
MultiplyPairs avx512vnni_multiply_pairs();
SearchBytes avx512vnni_search_bytes();
const Kernels* neon_kernels();
const IntegerKernels* neon_integers();
const IntegerKernels* neondot_integers();  // beside the kernels of neon

}  // namespace tq
