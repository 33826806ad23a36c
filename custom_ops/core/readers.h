// The three readers that make_row_reader (core/row_reader.h) chooses from.
#pragma once

#include <memory>

#include "core/row_reader.h"

namespace tq {

// lloyd_max, uniform, uniform_signed, u8
std::unique_ptr<const RowReader> make_coded_reader(const Kernels& kernels, const CacheView& cache,
                                                   int head_size);
// prod
std::unique_ptr<const RowReader> make_two_part_reader(const Kernels& kernels,
                                                      const CacheView& cache, int head_size);
// raw, fp8_e4m3, q8_0
std::unique_ptr<const RowReader> make_byte_reader(const Kernels& kernels, const CacheView& cache,
                                                  Element element, int head_size);

}  // namespace tq
