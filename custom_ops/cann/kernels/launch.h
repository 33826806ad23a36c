// The C ABI of a kernel library: what a host that opened it with dlopen looks up by name. Plain C;
// no header of CANN is needed, a stream is a void*.
//
// A build of Ascend makes aclrtlaunch_<kernel> of each kernel; the simulated library of the tests
// (custom_ops/cann/testing/shim) has the same functions. They enqueue a launch on `cores` vector
// cores and return 0, or an error of the runtime. All addresses are on the device: of a cache any,
// as the rows of one are anywhere, of the rest multiples of 32 bytes. Nothing is checked on the
// device: the caller has checked what is said below, and for encode and attention that
//
//   head_size is 64 or 128; batch, heads, new_tokens, cores and query_heads are at least 1
//   query_heads is a multiple of heads
//   overlay_rows + every past length + new_tokens is at most capacity, and 0 at least
//   the caches are [batch, heads, capacity, W] with the W of lloyd_max and their bits, 1 to 5, and
//   no wider; on 2002 W is at least 32
//   the overlay_rows in front of the tokens' have room for the entries of both caches, which
//   `recent` and `sinks`, 4,096 together at most, say (docs/operators.md); without entries both are 0
//   products of sizes: batch * heads * new_tokens * group is below 2^32
//
// rotation is float32 [D, D], centroids float32 [2^bits], boundaries float32 [2^bits - 1]. `lengths`
// is int64 [batch], the past length of each sequence, or null, and then past_length is that of all.
// An offset is float32 [offset_rows, heads, D] of 1 to 64 rows, or null: what slot s has is row
// min(s, offset_rows - 1).
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// The digest of the row layout that the kernels were compiled with (tq/codec_spec.h); a host with
// another refuses the library.
const char* tq_kernels_layout_digest(void);

// The number of this interface, raised whenever arguments change; a host with another refuses the
// library.
#define TQ_KERNELS_INTERFACE 4
uint32_t tq_kernels_interface(void);

// Vectors [batch, heads, new_tokens, D], less their offsets, to the rows of `cache` from overlay_rows
// and each past length on, and their entries; a past length of 0 clears the tags of other entries.
// new_tokens may be 0 where there are entries. What else is in the cache stays as it is. `gains` are float32 [gain_count], 1 to 16 of
// them, or null for an encoder that does not search; norm_correction is 0, 1 or 2
// (docs/operators.md).
typedef uint32_t TqLaunchEncode(uint32_t cores, void* stream, void* vectors, void* rotation,
                                void* centroids, void* boundaries, void* offset, void* gains,
                                void* lengths, void* cache, uint32_t past_length, uint32_t batch,
                                uint32_t heads, uint32_t new_tokens, uint32_t capacity,
                                uint32_t offset_rows, uint32_t gain_count, uint32_t bits,
                                uint32_t norm_correction, uint32_t recent, uint32_t sinks,
                                uint32_t overlay_rows, uint32_t head_size);

TqLaunchEncode aclrtlaunch_tq_encode_float32;
TqLaunchEncode aclrtlaunch_tq_encode_float16;

// Causal attention of query [batch, query_heads, new_tokens, D] to `output`, likewise; the caches
// have the new rows already. `scale` is the factor on the scores. `softcap` is 0, or 1 to 100: scores
// become softcap * tanh(score / softcap). `head_sink` is [query_heads] in the elements of the query,
// or null: one more score for each head, of a key without a value. A query sees no slot before
// `first_slot`, and of a `sliding_window` above 0 as many as that, its own included; one that sees
// none gets zeros.
//
// With `parts` 1 that is all, and `scratch` is not read. With more, the keys that a task sees, from a
// multiple of 64 on, are cut into parts of `part_tokens`, a multiple of 64, of which every task has
// `parts` at most: the launch leaves scratch, and the output is written by a launch of the merge behind it on the same stream. parts
// is at most 64. Scratch is tasks * parts * 8 * (D + 2) floats (attention_tasks.h); a task is up to
// eight of the group * new_tokens queries of a head, the whole groups that fit where any does.
//
// With entries new_keys and new_values are the vectors [batch, heads, new_tokens, D] that the call's
// encodes got; else they are not read. Keys and values have offsets both or neither.
typedef uint32_t TqLaunchAttention(uint32_t cores, void* stream, void* query, void* keys,
                                   void* values, void* key_rotation, void* key_centroids,
                                   void* value_rotation, void* value_centroids, void* key_offset,
                                   void* value_offset, void* head_sink, void* new_keys,
                                   void* new_values, void* lengths, void* output, void* scratch,
                                   uint32_t past_length, uint32_t batch, uint32_t query_heads,
                                   uint32_t heads, uint32_t new_tokens, uint32_t capacity,
                                   uint32_t parts, uint32_t part_tokens, uint32_t offset_rows,
                                   uint32_t sliding_window, uint32_t first_slot,
                                   uint32_t key_bits, uint32_t value_bits, uint32_t recent,
                                   uint32_t sinks, uint32_t overlay_rows, uint32_t head_size,
                                   float scale, float softcap);

TqLaunchAttention aclrtlaunch_tq_attention_float32;
TqLaunchAttention aclrtlaunch_tq_attention_float16;

typedef uint32_t TqLaunchAttentionMerge(uint32_t cores, void* stream, void* scratch,
                                        void* value_rotation, void* value_offset,
                                        void* head_sink, void* lengths, void* output,
                                        uint32_t past_length, uint32_t batch,
                                        uint32_t query_heads, uint32_t heads, uint32_t new_tokens,
                                        uint32_t parts, uint32_t part_tokens,
                                        uint32_t offset_rows, uint32_t sliding_window,
                                        uint32_t first_slot, uint32_t head_size);

TqLaunchAttentionMerge aclrtlaunch_tq_attention_merge_float32;
TqLaunchAttentionMerge aclrtlaunch_tq_attention_merge_float16;

// The other operators of a decoder. Sizes are at least 1 and their products below 2^32; y does not
// overlap what is read. Elements of x and y are of the type in the kernel's name.

// y = x / sqrt(mean of squares of a row + epsilon) * scale, of x [rows, width] and scale [width],
// which is of the same type. width is a multiple of 16 and at most 65,536.
typedef uint32_t TqLaunchRmsNormalization(uint32_t cores, void* stream, void* x, void* scale,
                                          void* y, uint32_t rows, uint32_t width, float epsilon);

TqLaunchRmsNormalization aclrtlaunch_tq_rms_normalization_float32;
TqLaunchRmsNormalization aclrtlaunch_tq_rms_normalization_float16;

// Rotates the halves of x [heads, new_tokens, D] by the rows position .. position + count - 1 of
// cosines and sines, float32 [P, D / 2], at the tokens first .. first + count - 1 of every head.
// Other tokens of y stay as they are. head_size D is 64 or 128; first + count is at most
// new_tokens, position + count at most P. `heads` are those of all sequences.
typedef uint32_t TqLaunchRotaryEmbedding(uint32_t cores, void* stream, void* x, void* cosines,
                                         void* sines, void* y, uint32_t heads, uint32_t new_tokens,
                                         uint32_t first, uint32_t count, uint32_t position,
                                         uint32_t head_size);

TqLaunchRotaryEmbedding aclrtlaunch_tq_rotary_embedding_float32;
TqLaunchRotaryEmbedding aclrtlaunch_tq_rotary_embedding_float16;

// y = x / (1 + exp(-x)) of `count` elements, a multiple of 16.
typedef uint32_t TqLaunchSwish(uint32_t cores, void* stream, void* x, void* y, uint32_t count);

TqLaunchSwish aclrtlaunch_tq_swish_float32;
TqLaunchSwish aclrtlaunch_tq_swish_float16;

// x [batch, rows, columns, bytes] to y [batch, columns, rows, bytes]. bytes is a multiple of 32 and
// at most 65,536.
typedef uint32_t TqLaunchTranspose(uint32_t cores, void* stream, void* x, void* y, uint32_t batch,
                                   uint32_t rows, uint32_t columns, uint32_t bytes);

TqLaunchTranspose aclrtlaunch_tq_transpose;

#ifdef __cplusplus
}
#endif
