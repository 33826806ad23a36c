// What both operators take for a codec: its name and bits, rows, tables, rotation and offsets.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/rotation.h"
#include "ort/tensor.h"
#include "tq/codec_spec.h"

namespace tq::ort {

std::string rows_of(spec::Codec codec, int head_size);  // "lloyd_max 4 rows of head size 64"

// Reads `<prefix>codec` and `<prefix>bits`. Raw rows hold elements of `float_type`, or float16
// where ONNX Runtime runs a node of a float16 model in float32.
spec::Codec read_codec(const Api& api, const OrtKernelInfo* info, const char* op,
                       const std::string& prefix, int float_type);

// Rows of a cache: at least as wide as the codec's. Returns the width.
int expect_rows(const char* op, const Tensor& cache, spec::Codec codec, int head_size);

// The rotation [D, C] and the centroids; any floats where the codec has none.
void expect_tables(const char* op, const Tensor& rotation, const Tensor& centroids,
                   spec::Codec codec, int head_size);

// An offset [P, N, D]; returns P.
int64_t expect_offset(const char* op, const Tensor& offset, int64_t heads, int head_size);

// A rotation that the kernel was given when it was made, ready in the forms that it wants; one that
// comes with a call is made ready then.
class ReadyRotation {
 public:
  ReadyRotation(const Api& api, const OrtKernelInfo* info, const spec::Input& input,
                spec::Codec codec, bool wants_transposed);

  // `storage` keeps what is made for this call. The tensor has been checked.
  Rotation get(const Tensor& tensor, std::vector<float>& storage) const;

 private:
  const bool wants_transposed_;
  const bool is_rotated_;
  std::vector<float> transposed_, signs_;  // of a constant
  float step_ = 0.0f;
};

}  // namespace tq::ort
