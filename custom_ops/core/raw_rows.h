// Rows of the codec raw: the model's own elements, read as floats.
//
// Blocks are decoded to memory for Kernels::multiply, in the form of its decode_columns and
// decode_rows (core/kernels.h); there are no scales.
#pragma once

#include <cstdint>

#include "core/element.h"
#include "core/kernels.h"

namespace tq {

// keys[j][t] = coordinate j of row t, leading dimension kBlock, zero for t >= count and in the
// padding.
void decode_raw_columns(const Kernels& kernels, const RowFormat& format, Element element,
                        const uint8_t* rows, int count, float* keys);

// values[t][j] = coordinate j of row t, leading dimension format.padded, zero for padding.
void decode_raw_rows(const Kernels& kernels, const RowFormat& format, Element element,
                     const uint8_t* rows, int count, float* values);

// sums[r] += sum over t of weights[r][t] * values[t]. A weight of zero adds nothing, even where a
// value is not finite; `values` is changed.
void accumulate_raw_rows(const Kernels& kernels, const RowFormat& format, const float* weights,
                         int queries, float* values, int count, float* sums);

}  // namespace tq
