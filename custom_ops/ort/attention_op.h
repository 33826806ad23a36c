// TurboQuantDequantAttention(query [B, H, T, D], key_cache uint8 [B, N, S, Wk],
//                            value_cache uint8 [B, N, S, Wv], past_length int64 [B] or [1],
//                            key_rotation f32 [D, Ck] or [N, D, D], key_centroids f32,
//                            value_rotation f32 [D, Cv] or [N, D, D], value_centroids f32,
//                            attention_bias (optional), head_sink [H] (optional),
//                            key_offset, value_offset f32 [P, N, D] (both or neither),
//                            new_keys, new_values [B, N, T, D] (optional),
//                            left_padding int64 [B] or [1] (optional))
//   -> [B, H, T, D]
// C is D, for prod 2 D, which has no matrix of each head. Of a codec that does not rotate, rotation
// and centroids are floats of any shape, and not read.
// Refuses: another shape, rank or type, rows that are narrower than the codec's, H not a multiple
// of N, a past_length that is negative or leaves fewer than T slots, a left_padding that is
// negative or above the slots, a bias that does not broadcast, more than kMaxOffsets rows of an offset, a window without new_keys and new_values or
// without room for its entries.
#pragma once

#include "core/attention.h"
#include "ort/codec_inputs.h"
#include "ort/custom_op.h"
#include "ort/window_inputs.h"

namespace tq::ort {

struct AttentionAttributes {
  spec::Codec key, value;
  float scale, softcap;
  bool causal;
  int64_t sliding_window;
  Window window;
};

// Of either operator: codecs, scale, softcap and sliding window.
AttentionAttributes read_common_attributes(const Api& api, const OrtKernelInfo* info,
                                           const char* op, int float_type);
AttentionAttributes read_attention_attributes(const Api& api, const OrtKernelInfo* info,
                                              int float_type);

// The tensors of one call, checked. Only lengths and padding were read: the rest may be on a device.
struct AttentionTensors {
  Tensor query, key_cache, value_cache, past_length;
  Tensor key_rotation, key_centroids, value_rotation, value_centroids;
  Tensor bias, sink, key_offset, value_offset, new_keys, new_values, left_padding, output;
  int64_t batch, query_heads, heads, tokens, slots;
  int64_t bias_stride[4];  // in elements, zero where it is broadcast
  int64_t offsets;
  int head_size;
};

AttentionTensors read_attention(const Api& api, OrtKernelContext* context,
                                const AttentionAttributes& attributes, int float_type);

// Of either operator. The number of heads that queries of a head of the cache have to share.
CacheView view_of(const Tensor& cache, spec::Codec codec, const Tensor& centroids);
void expect_groups(const char* op, int64_t query_heads, int64_t heads);
void expect_sink(const char* op, const Tensor& sink, int float_type, int64_t query_heads);
// How many rows the offsets have; none without.
int64_t expect_offsets(const char* op, const Tensor& key, const Tensor& value, int64_t heads,
                       int head_size);
float skip_below(const char* op);

// Environment variable: values whose weights are all below this share of the largest are skipped.
inline constexpr char kSkipVariable[] = "TQ_ONNX_SKIP_BELOW";
inline constexpr float kSkipBelow = 1e-4f;  // by default

class AttentionKernel {
 public:
  static Signature signature(int float_type);

  AttentionKernel(const Api& api, const OrtKernelInfo* info, Element element);
  void compute(OrtKernelContext* context);
  const Api& api() const { return api_; }

 private:
  Api api_;
  Element element_;
  int float_type_;
  const Kernels& kernels_;
  AttentionAttributes attributes_;
  float skip_below_;
  ReadyRotation key_rotation_, value_rotation_;
};

}  // namespace tq::ort
