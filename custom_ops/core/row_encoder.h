// Encodes vectors to rows, for every codec.
//
// The bytes depend on neither the threads, nor the instruction set, nor what else is encoded: sums
// of squares add in one fixed tree, an element of a product is one chain of fused multiply-adds,
// and every other step is one correctly rounded operation.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/encode.h"
#include "core/kernels.h"
#include "core/row_format.h"

namespace tq {

class RowEncoder {
 public:
  static constexpr int kMaxRows = 64;
  static constexpr int kMaxFloats = 8 * spec::kMaxHeadSize;

  // How many rows can be encoded at once; bounds the work areas, which lie on the stack.
  static int rows_at_once(int head_size) { return std::min(kMaxRows, kMaxFloats / head_size); }

  // The call outlives this object.
  RowEncoder(const Kernels& kernels, const EncodeCall& call);

  // Writes the rows of x [count, D], which is changed, of these KV heads to rows[0], ..., up to
  // their last byte.
  void encode(float* x, int count, const int64_t* heads, uint8_t* const* rows) const;

 private:
  void encode_rotated(float* x, int count, const int64_t* heads, uint8_t* const* rows) const;
  void code(const float* y, int count, const int64_t* heads, const float* norms, uint8_t* codes,
            float* scales) const;
  void search(const float* y, int count, const int64_t* heads, const float* norms, uint8_t* codes,
              float* scales) const;
  void encode_residuals(const float* x, int count, const float* scales, float* scratch,
                        uint8_t* codes, uint8_t* const* rows) const;
  void encode_steps(const float* x, uint8_t* row) const;
  void encode_blocks(const float* x, uint8_t* row) const;
  void pack(const uint8_t* codes, uint8_t* row) const;

  const Kernels& kernels_;
  const EncodeCall& call_;
  const int size_;    // of a vector
  const int fields_;  // first byte of the fields
  const int used_;    // bytes of a row, without the padding
  const bool searches_;
  const spec::Planes planes_;
  const int levels_;
  float table_[kTable]{}, numbers_[kTable]{};
  float unit_ = 1.0f;  // of the numbers
};

}  // namespace tq
