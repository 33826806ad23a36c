// The simulated kernel library: the unmodified kernels, and the entry points that the build of
// Ascend makes of them (launch.h).
#include "kernel_operator.h"
#include "launch_queue.h"

#include "../../kernels/launch.h"
#include "../../kernels/library.cpp"
#include "../../kernels/tq_attention.cpp"
#include "../../kernels/tq_attention_merge.cpp"
#include "../../kernels/tq_encode.cpp"
#include "../../kernels/tq_rms_normalization.cpp"
#include "../../kernels/tq_rotary_embedding.cpp"
#include "../../kernels/tq_swish.cpp"
#include "../../kernels/tq_transpose.cpp"

namespace {

GM_ADDR at(void* address) { return static_cast<GM_ADDR>(address); }

}  // namespace

extern "C" {

// The kernels' own arguments, in the order of launch.h.
#define SHIM_LAUNCH_ENCODE(NAME)                                                                  \
  uint32_t aclrtlaunch_##NAME(uint32_t cores, void* stream, void* vectors, void* rotation,        \
                              void* centroids, void* boundaries, void* offset, void* gains,       \
                              void* lengths, void* cache, uint32_t past_length, uint32_t          \
                              batch, uint32_t heads, uint32_t new_tokens, uint32_t capacity,      \
                              uint32_t offset_rows, uint32_t gain_count, uint32_t bits,           \
                              uint32_t norm_correction, uint32_t recent, uint32_t sinks,          \
                              uint32_t overlay_rows, uint32_t head_size) {                        \
    return shim::launch(cores, stream, #NAME, [=] {                                               \
      NAME(at(vectors), at(rotation), at(centroids), at(boundaries), at(offset), at(gains),       \
           at(lengths), at(cache), past_length, batch, heads, new_tokens, capacity,               \
           offset_rows, gain_count, bits, norm_correction, recent, sinks, overlay_rows,           \
           head_size);                                                                            \
    });                                                                                           \
  }

#define SHIM_LAUNCH_ATTENTION(NAME)                                                               \
  uint32_t aclrtlaunch_##NAME(uint32_t cores, void* stream, void* query, void* keys, void*        \
                              values, void* key_rotation, void* key_centroids, void*              \
                              value_rotation, void* value_centroids, void* key_offset, void*      \
                              value_offset, void* head_sink, void* new_keys, void* new_values,    \
                              void* lengths, void* output,                                        \
                              void* scratch, uint32_t past_length, uint32_t batch, uint32_t       \
                              query_heads, uint32_t heads, uint32_t new_tokens, uint32_t          \
                              capacity, uint32_t parts, uint32_t part_tokens, uint32_t            \
                              offset_rows, uint32_t sliding_window, uint32_t first_slot,          \
                              uint32_t key_bits, uint32_t value_bits, uint32_t recent,            \
                              uint32_t sinks, uint32_t overlay_rows, uint32_t head_size,          \
                              float scale, float softcap) {                                       \
    return shim::launch(cores, stream, #NAME, [=] {                                               \
      NAME(at(query), at(keys), at(values), at(key_rotation), at(key_centroids),                  \
           at(value_rotation), at(value_centroids), at(key_offset), at(value_offset),             \
           at(head_sink), at(new_keys), at(new_values), at(lengths), at(output), at(scratch),     \
           past_length, batch, query_heads, heads, new_tokens, capacity, parts, part_tokens,      \
           offset_rows, sliding_window, first_slot, key_bits, value_bits, recent, sinks,          \
           overlay_rows, head_size, scale, softcap);                                              \
    });                                                                                           \
  }

#define SHIM_LAUNCH_ATTENTION_MERGE(NAME)                                                         \
  uint32_t aclrtlaunch_##NAME(uint32_t cores, void* stream, void* scratch, void*                  \
                              value_rotation, void* value_offset, void* head_sink, void* lengths, \
                              void* output, uint32_t past_length, uint32_t batch, uint32_t        \
                              query_heads, uint32_t heads, uint32_t new_tokens, uint32_t parts,   \
                              uint32_t part_tokens, uint32_t offset_rows, uint32_t                \
                              sliding_window, uint32_t first_slot, uint32_t head_size) {          \
    return shim::launch(cores, stream, #NAME, [=] {                                               \
      NAME(at(scratch), at(value_rotation), at(value_offset), at(head_sink), at(lengths),         \
           at(output), past_length, batch, query_heads, heads, new_tokens, parts, part_tokens,    \
           offset_rows, sliding_window, first_slot, head_size);                                   \
    });                                                                                           \
  }

#define SHIM_LAUNCH_RMS_NORMALIZATION(NAME)                                                       \
  uint32_t aclrtlaunch_##NAME(uint32_t cores, void* stream, void* x, void* scale, void* y,        \
                              uint32_t rows, uint32_t width, float epsilon) {                     \
    return shim::launch(cores, stream, #NAME,                                                     \
                        [=] { NAME(at(x), at(scale), at(y), rows, width, epsilon); });            \
  }

#define SHIM_LAUNCH_ROTARY_EMBEDDING(NAME)                                                        \
  uint32_t aclrtlaunch_##NAME(uint32_t cores, void* stream, void* x, void* cosines, void* sines,  \
                              void* y, uint32_t heads, uint32_t new_tokens, uint32_t first,       \
                              uint32_t count, uint32_t position, uint32_t head_size) {            \
    return shim::launch(cores, stream, #NAME, [=] {                                               \
      NAME(at(x), at(cosines), at(sines), at(y), heads, new_tokens, first, count, position,       \
           head_size);                                                                            \
    });                                                                                           \
  }

#define SHIM_LAUNCH_SWISH(NAME)                                                                   \
  uint32_t aclrtlaunch_##NAME(uint32_t cores, void* stream, void* x, void* y, uint32_t count) {   \
    return shim::launch(cores, stream, #NAME, [=] { NAME(at(x), at(y), count); });                \
  }

uint32_t aclrtlaunch_tq_transpose(uint32_t cores, void* stream, void* x, void* y, uint32_t batch,
                                  uint32_t rows, uint32_t columns, uint32_t bytes) {
  return shim::launch(cores, stream, "tq_transpose",
                      [=] { tq_transpose(at(x), at(y), batch, rows, columns, bytes); });
}

SHIM_LAUNCH_ENCODE(tq_encode_float32)
SHIM_LAUNCH_ENCODE(tq_encode_float16)
SHIM_LAUNCH_ATTENTION(tq_attention_float32)
SHIM_LAUNCH_ATTENTION(tq_attention_float16)
SHIM_LAUNCH_ATTENTION_MERGE(tq_attention_merge_float32)
SHIM_LAUNCH_ATTENTION_MERGE(tq_attention_merge_float16)
SHIM_LAUNCH_RMS_NORMALIZATION(tq_rms_normalization_float32)
SHIM_LAUNCH_RMS_NORMALIZATION(tq_rms_normalization_float16)
SHIM_LAUNCH_ROTARY_EMBEDDING(tq_rotary_embedding_float32)
SHIM_LAUNCH_ROTARY_EMBEDDING(tq_rotary_embedding_float16)
SHIM_LAUNCH_SWISH(tq_swish_float32)
SHIM_LAUNCH_SWISH(tq_swish_float16)

}  // extern "C"
