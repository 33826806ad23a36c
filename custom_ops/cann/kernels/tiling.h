// The arguments of the kernels (launch.h): a struct each, which the host fills and a launch copies to
// the device. They are named here alone; testing/simulated_kernels.py reads this file.
//
// Their members are integers and floats, and those of 64 bits come first: host and device agree on
// the layout whatever compiles them.
//
// A uint64_t is an address on the device, or 0 where the text says so: of a cache any, as the rows of
// one are anywhere, of the rest multiples of 32 bytes. Nothing is checked on the device. The caller
// has checked what is said below, and for encode and attention that
//
//   head_size D is 64 or 128; batch, heads, new_tokens and query_heads are at least 1
//   query_heads is a multiple of heads
//   overlay_rows + every past length + new_tokens is at most capacity, and 0 at least
//   the caches are [batch, heads, capacity, W] with the W of lloyd_max and their bits, 1 to 5, and
//   no wider; on 2002 W is at least 32
//   the overlay_rows in front of the tokens', behind them in planes, have room for the entries of both caches, which
//   `recent` and `sinks`, 4,096 together at most, say (docs/operators.md); without entries both are 0
//   products of sizes: batch * heads * new_tokens * group is below 2^32
//
// A rotation is float32 [D, D], centroids are float32 [2^bits], boundaries float32 [2^bits - 1].
// `lengths` is int64 [batch], the past length of each sequence, or 0, and then past_length is that of
// all. An offset is float32 [offset_rows, heads, D] of 1 to 64 rows, or 0: slot s has row
// min(s, offset_rows - 1).
#pragma once

#include <stdint.h>

// What is added to the bits of uniform_signed, 3 or 4, so that they are not those of lloyd_max; and to
// those where codes and scales lie apart, in planes (cache_places.h), which those with 4 bits do.
static constexpr uint32_t kTqSignedBits = 16, kTqPlanes = 32;

// Vectors [batch, heads, new_tokens, D], less their offsets, to the rows of `cache` from each
// past length on, and their entries; a past length of 0 clears the tags of other entries.
// new_tokens may be 0 where there are entries. Other bytes of the cache stay as they are. `gains` are
// float32 [gain_count], 1 to 16 of them, or 0 for an encoder that does not search; norm_correction is
// 0, 1 or 2 (docs/operators.md).
struct TqEncodeTiling {
  uint64_t vectors, rotation, centroids, boundaries, offset, gains, lengths, cache;
  uint32_t past_length, batch, heads, new_tokens, capacity, offset_rows, gain_count, bits;
  uint32_t norm_correction, recent, sinks, overlay_rows, head_size;
};

// Causal attention of query [batch, query_heads, new_tokens, D] to `output`, likewise; the caches
// have the new rows already. `scale` is the factor on the scores. `softcap` is 0, or 1 to 100: scores
// become softcap * tanh(score / softcap). `head_sink` is [query_heads] in the elements of the query,
// or 0: one more score for each head, of a key without a value. A query sees no slot before
// `first_slot`, and of a `sliding_window` above 0 as many as that, its own included; one that sees
// none gets zeros.
//
// With `parts` 1 that is all, and `scratch` is not read. With more, the keys that a task sees, from a
// multiple of 64 on, are cut into parts of `part_tokens`, a multiple of 64, of which every task has
// `parts` at most: the launch leaves scratch, and the output is written by a launch of the merge
// behind it on the same stream, with the same arguments. parts is at most 64. Scratch is
// tasks * parts * 8 * (D + 2) floats (attention_tasks.h); a task is up to eight of the
// group * new_tokens queries of a head, the whole groups that fit where any does.
//
// `middle` is 0, or float16 [batch, query_heads, D]: what attention over the slots middle_first ..
// middle_end - 1 alone gave, before it is rotated back, with coordinates i and i + D / 2 as neighbours;
// and `middle_logs` are the logarithms of its sums of weights, float32 [batch, query_heads] with room
// for eight more. Then the launch attends to the other slots and joins both; new_tokens and parts are
// 1, and none of these slots may have an entry. Without it middle_end is 0.
//
// With entries new_keys and new_values are the vectors [batch, heads, new_tokens, D] that the call's
// encodes got; else they are 0. Keys and values have offsets both or neither.
struct TqAttentionTiling {
  uint64_t query, keys, values, key_rotation, key_centroids, value_rotation, value_centroids;
  uint64_t key_offset, value_offset, head_sink, new_keys, new_values, lengths, output, scratch;
  uint64_t middle, middle_logs;
  uint32_t past_length, batch, query_heads, heads, new_tokens, capacity, parts, part_tokens;
  uint32_t offset_rows, sliding_window, first_slot, key_bits, value_bits, recent, sinks;
  uint32_t overlay_rows, head_size, middle_first, middle_end;
  float scale, softcap;
};

// Rotates the halves of x [heads, new_tokens, D] by the rows position .. position + count - 1 of
// cosines and sines, float32 [P, D / 2], at the tokens first .. first + count - 1 of every head.
// Other tokens of y stay as they are. head_size D is 64 or 128; first + count is at most
// new_tokens, position + count at most P. `heads` are those of all sequences. Sizes are at least 1 and
// their products below 2^32; y does not overlap what is read.
struct TqRotaryEmbeddingTiling {
  uint64_t x, cosines, sines, y;
  uint32_t heads, new_tokens, first, count, position, head_size;
};
