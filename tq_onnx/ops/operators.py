"""The operators: one record for each, the only place that says what they take and return.

Schemas, function bodies and their documentation, the tables of ``docs/operators.md`` and the slots
in ``custom_ops/include/tq/operators.h`` are made of these records. The order of the inputs is that
of their slots.
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from tq_onnx.ops import domain
from tq_onnx.ops.features import (
    ATTENTION_BIAS,
    EXACT_WINDOW,
    FEEDBACK,
    GAINS,
    HEAD_SINK,
    LEFT_PADDING,
    MIXED_CODECS,
    OFFSETS,
    PLANES,
    ROTARY_OFFSETS,
)
from tq_onnx.ops.operator import (
    BYTES,
    FLOAT32,
    FLOATS,
    INT32,
    INT64,
    Attribute,
    Input,
    Operator,
    Output,
)

_INT: Final = ir.AttributeType.INT
_FLOAT: Final = ir.AttributeType.FLOAT
_STRING: Final = ir.AttributeType.STRING


class Encode(Operator):
    """Appends compressed vectors to a cache."""

    name = domain.ENCODE
    summary = """\
Compresses new key or value vectors and appends them to a key/value cache.

A row of the cache holds one vector: the codes of its coordinates, then little-endian floats
(float16, those of u8 and uniform_signed float32). The codec says what they mean:

- `lloyd_max`: the vector is normalised, rotated by an orthogonal matrix R and rounded, coordinate
  by coordinate, to the centroids of a codebook:

      code  = number of boundaries <= (x / |x|) R
      scale = |x| / |centroids[code]|     (|x| alone without norm correction)
      x    ~= scale * centroids[code] R^T

  With `gains` the codes are those of g (x / |x|) R for the gain g that leaves the least error, with
  `feedback` the coordinates make up for each other's errors (see the inputs); the rows mean the
  same
- `uniform_signed`: the same with integers, -2^(bits - 1) to 2^(bits - 1) - 1, in two's complement,
  instead of centroids, and a scale in float32 that may be negative. Encoders take a codebook of
  centroids that are these integers times a step, and gains of both signs; the scale is that of the
  centroids times the centroid of 1. Attention does not read the codebook:

      x    ~= scale * code R^T

- `prod`: `lloyd_max` with one bit less; then, of the residual r = x - scale * centroids[code] R^T,
  the signs of a random projection S r and |r|, which add sqrt(pi/2) / D * |r| * S^T signs
- `u8`: `lloyd_max` with a byte per code, without norm correction, the scale in float32
- `uniform`: x ~= scale * code + zero, zero the smallest coordinate
- `q8_0`: x ~= scale * code, code a signed byte, one scale for each 32 coordinates
- `fp8_e4m3`: every coordinate as a float of eight bits, E4M3FN, saturating
- `raw`: every coordinate as it is

A vector that is not finite (`lloyd_max`, `uniform_signed`, `prod`, `u8`: whose norm is not) is
stored as the zero vector by all but `raw`.

The newest `recent` tokens and the first `sinks` ones have entries, besides their rows: the vector
in float16 and the token's number. With overlay_rows, tokens have their rows behind so many others,
which hold the entries: the slot of token t is row overlay_rows + t. Without, entries lie at the
end of the cache, as far as there are rows behind those of the tokens.

Tables that a codec does not need are not read; a tensor of one number takes their place."""

    vectors = Input(FLOATS, "new vectors [B, N, T, D]: batch, KV heads, new tokens, head size")
    past = Input(BYTES, "cache so far [B, N, P, W]; W is at least the number of bytes of a row")
    past_length = Input(
        INT64,
        "tokens already in the cache, per sequence [B] or one for all [1]; new token t of "
        "sequence b goes to slot past_length[b] + t",
    )
    rotation = Input(
        FLOAT32,
        "orthogonal matrix R [D, D], applied to row vectors from the right; with prod [R | S^T], "
        "[D, 2 D]",
    )
    centroids = Input(FLOAT32, "codebook, ascending [L]")
    boundaries = Input(FLOAT32, "decision boundaries, ascending [L - 1]; ties go up")
    offset = Input(
        FLOAT32,
        "vectors to encode the differences from [K, N, D]: the row in slot p of head n is that of "
        "x - offset[min(p, K - 1), n]",
        when={OFFSETS},
    )
    gains = Input(
        FLOAT32,
        "factors g [G], G up to 16, by which u = (x / |x|) R is multiplied before it is coded: of "
        "the results, the codes are kept whose centroids c have the largest <u, c>^2 / <c, c> (0 "
        "if <u, c> is not positive, of uniform_signed if it is 0; the first of equals); lloyd_max "
        "and uniform_signed only",
        when={GAINS},
    )
    feedback = Input(
        FLOAT32,
        "second moments of the queries in the space of u, H = L diag(h) L^T, as one matrix "
        "[N, D, D]: below the diagonal L, which is unit lower triangular, on the diagonal h. Each "
        "column of L below the diagonal is rounded to multiples of 1/127 of its largest number. "
        "<a, b> is then a H b^T, and coordinates are coded from the last to the first: j as "
        "u_j - sum over i > j of (c_i / g - u_i) L_ij. One number [1] for none; lloyd_max and "
        "uniform_signed only",
        when={FEEDBACK},
    )
    frequencies = Input(
        FLOAT32,
        "radians by which what is subtracted turns from a slot to the next, at most pi [D]: the "
        "row in slot s of head n is then that of x - offset[0, n] cos(p f) - offset[1, n] "
        "sin(p f), p = max(s - left_padding[b], 0), and less offset[2 + p, n] where p < K - 2; "
        "p f is a product in float64; one number [1] for an offset that does not turn",
        when={ROTARY_OFFSETS},
    )
    left_padding = Input(
        INT64,
        "how many of the first slots hold padding, per sequence [B] or one for all [1]; only "
        "frequencies heed it",
        when={ROTARY_OFFSETS, LEFT_PADDING},
    )

    present = Output(
        BYTES,
        "cache with the new rows [B, N, S, W], S = max(P, overlay_rows + max(past_length) + T); "
        "other rows are copied from past or zero; padding behind a row is zero. If past and "
        "present are the same buffer, only the new rows and entries are written",
    )

    codec = Attribute(
        _STRING,
        "codec kind: lloyd_max, uniform, fp8_e4m3, q8_0, prod, u8, raw or uniform_signed",
    )
    bits = Attribute(
        _INT,
        "bits per coordinate: lloyd_max 1 to 5, uniform 2 to 4, fp8_e4m3 8, q8_0 8, prod 3 or 4, "
        "u8 4, uniform_signed 3 or 4, raw those of the element type",
    )
    norm_correction = Attribute(
        _INT,
        "scale of lloyd_max, uniform_signed and prod: 0: |x|; 1: such that the decoded vector has "
        "the norm of x; 2: such that its product with x is |x|^2, |x| <u, u> / <u, c>",
    )
    codec_index = Attribute(
        _INT,
        "index of the codec (with or without feedback) among those in the function body of the "
        "model",
        default=0,
        when={MIXED_CODECS},
    )
    recent = Attribute(
        _INT, "how many of the newest tokens have entries", default=0, when={EXACT_WINDOW}
    )
    sinks = Attribute(
        _INT, "how many of the first tokens have entries", default=0, when={EXACT_WINDOW}
    )
    overlay_rows = Attribute(
        _INT,
        "rows in front of those of the tokens: at least (sinks + recent) * ceil((2 D + 4) / W), or "
        "0 for entries in spare rows",
        default=0,
        when={EXACT_WINDOW},
    )
    planes = Attribute(
        _INT,
        "1 where codes and fields lie apart, with codecs that rotate only: the bytes of a sequence "
        "are then the codes [N, S - R, W - F], the fields [N, S - R, F] and the rows in front "
        "[N, R, W], of rows with F bytes of fields and R = overlay_rows",
        default=0,
        when={PLANES},
    )


class Attention(Operator):
    """Attends to compressed keys and values."""

    name = domain.ATTENTION
    summary = """\
Scaled dot-product attention over compressed key and value caches.

Grouped-query attention in float32 that decodes rows while it reads them. Where rows are rotated it
works in the rotated space: the query is rotated once, the output is un-rotated once, and no key or
value ever is.

    score(t, s)  = scale * q_t . k_s,  then softcap * tanh(score / softcap) if softcap > 0
    output(t)    = sum over visible s of softmax(score(t, .) + bias)(s) * v_s

Query t of sequence b stands at position p = past_length[b] + t. Key s is visible iff it exists (s <
past_length[b] + T), is not in the future (s <= p, if causal), is within the window (p - s <
sliding_window, if set), is no padding (s >= left_padding[b], if given), and its bias is above half
of the lowest finite value of the bias's type. A query that sees no key gives exact zeros; a hidden
key contributes nothing. With head_sink, exp(head_sink) of the query's head is added to the
denominator of the softmax. With offsets, k_s and v_s are what the rows say plus the offsets of slot
s.

With an exact window (see TurboQuantEncode), k_s and v_s are vectors in float16 instead, where
p - s < recent or s < sinks, as far as they are at hand: all tokens from s on, or all up to s, have
their entries or belong to the call.

Tables that a codec has no use for are not read."""

    query = Input(
        FLOATS, "queries [B, H, T, D]: H is a multiple of N; head h reads KV head h // (H / N)"
    )
    key_cache = Input(
        BYTES, "compressed keys [B, N, S, Wk], the new ones included (see TurboQuantEncode)"
    )
    value_cache = Input(BYTES, "compressed values [B, N, S, Wv], the new ones included")
    past_length = Input(INT64, "tokens before the new ones, per sequence [B] or one for all [1]")
    key_rotation = Input(
        FLOAT32,
        "rotation of the keys, as in TurboQuantEncode; if it is not orthogonal, its transposed "
        "inverse",
    )
    key_centroids = Input(FLOAT32, "codebook of the keys")
    value_rotation = Input(FLOAT32, "likewise of the values")
    value_centroids = Input(FLOAT32, "codebook of the values")
    attention_bias = Input(
        FLOATS,
        "added to the scores; each of its four dimensions is 1 or that of [B, H, T, total], "
        "total = max(past_length) + T; columns beyond total are ignored",
        when={ATTENTION_BIAS},
    )
    head_sink = Input(
        FLOATS,
        "one more score per query head [H], neither scaled nor capped: its exponential is added to "
        "the denominator of the softmax; minus infinity for none",
        when={HEAD_SINK},
    )
    key_offset = Input(
        FLOAT32,
        "what was subtracted from keys before they were encoded [K, N, D]: offset[min(s, K - 1), "
        "n] is added to the key in slot s of head n",
        when={OFFSETS},
    )
    value_offset = Input(
        FLOAT32,
        "likewise for values; of the same shape, but for key_offset that turns; both or neither",
        when={OFFSETS},
    )
    new_keys = Input(
        FLOATS,
        "keys of the call [B, N, T, D], as TurboQuantEncode gets them; needed with recent or sinks",
        when={EXACT_WINDOW},
    )
    new_values = Input(FLOATS, "likewise values", when={EXACT_WINDOW})
    left_padding = Input(
        INT64,
        "how many of the first slots hold padding, per sequence [B] or one for all [1]: no query "
        "sees those",
        when={LEFT_PADDING},
    )
    key_frequencies = Input(
        FLOAT32,
        "radians by which the offset of keys turns from a slot to the next [D], as in "
        "TurboQuantEncode: what is added to the key in slot s is then the same as was subtracted; "
        "one number [1] for an offset that does not turn",
        when={ROTARY_OFFSETS},
    )

    output = Output(FLOATS, "attention output [B, H, T, D], in the query's type")

    scale = Attribute(_FLOAT, "factor on the scores, usually 1 / sqrt(D)")
    causal = Attribute(_INT, "1: a query sees no later key; 0: it sees all that exist")
    sliding_window = Attribute(_INT, "number of visible keys, the query's own included; 0 for all")
    softcap = Attribute(_FLOAT, "c in c * tanh(score / c); 0 for none")
    key_codec = Attribute(_STRING, "codec kind of the keys, as in TurboQuantEncode")
    key_bits = Attribute(_INT, "bits per coordinate of the keys, as in TurboQuantEncode")
    value_codec = Attribute(_STRING, "codec kind of the values, as in TurboQuantEncode")
    value_bits = Attribute(_INT, "bits per coordinate of the values, as in TurboQuantEncode")
    key_codec_index = Attribute(
        _INT,
        "index of the keys' codec among those in the function body of the model",
        default=0,
        when={MIXED_CODECS},
    )
    value_codec_index = Attribute(
        _INT, "likewise of the values' codec", default=0, when={MIXED_CODECS}
    )
    recent = Attribute(
        _INT,
        "how many of the newest tokens a query reads in float16, its own included; 0 with raw",
        default=0,
        when={EXACT_WINDOW},
    )
    sinks = Attribute(
        _INT,
        "how many of the first tokens a query reads in float16; 0 with raw. Not the head_sink",
        default=0,
        when={EXACT_WINDOW},
    )
    overlay_rows = Attribute(
        _INT,
        "rows in front of those of the tokens, as in TurboQuantEncode",
        default=0,
        when={EXACT_WINDOW},
    )
    planes = Attribute(
        _INT, "whether codes and fields lie apart, as in TurboQuantEncode", default=0, when={PLANES}
    )


_CUMULATIVE: Final = (
    "index of the first packed token of each request, then T [R + 1]: starts with 0 and never "
    "decreases"
)
_PAST: Final = "number of tokens that each request has in its pages before the call [R]"
_TABLE: Final = (
    "pages of each request, in the order of its tokens [R, C]; the token in slot p of a request is "
    "in row p % S of page block_table[r, p / S]. Entries that no token needs may be any number"
)


class PagedEncode(Operator):
    """Writes compressed vectors into pages."""

    name = domain.PAGED_ENCODE
    summary = """\
Compresses new key or value vectors, as TurboQuantEncode does, and writes them into pages that a
block table names.

The tokens of R requests lie one behind the other, without padding. Rows are those of
TurboQuantEncode; the bytes of a page are [N, S, W]: the rows of a head lie together. Its dimensions
are named in the order of onnxruntime's PagedAttention, [S, N, W], which takes as many bytes.

A page that is written to belongs to one request, and stands in its table once: pages that
requests share are read only.

With row_stride, row o of a head of a page begins at byte o * row_stride of its S * W bytes. Entries
of 2 D + 4 bytes (see TurboQuantEncode) lie behind the rows, one in front of the other from the end
of the page on: in the first page of a request those of its first `sinks` tokens, then in any page
those of its newest tokens, as many as there is room for and at most `recent`. A page that is full
has room for S * (W - row_stride) bytes of them. The first token of a page zeroes what is behind the
new rows.

Tables that a codec does not need are not read; a tensor of one number takes their place."""

    vectors = Input(FLOATS, "new vectors [1, N, T, D]: KV heads, packed tokens, head size")
    past = Input(BYTES, "pages so far [P, S, N, W]; W is at least the number of bytes of a row")
    cumulative_sequence_length = Input(INT32, _CUMULATIVE)
    past_seqlens = Input(INT32, _PAST)
    block_table = Input(INT32, _TABLE)
    rotation = Input(FLOAT32, "as in TurboQuantEncode")
    centroids = Input(FLOAT32, "as in TurboQuantEncode")
    boundaries = Input(FLOAT32, "as in TurboQuantEncode")
    offset = Input(
        FLOAT32,
        "as in TurboQuantEncode; slots are those of a request",
        when={OFFSETS},
    )
    gains = Input(FLOAT32, "as in TurboQuantEncode", when={GAINS})
    feedback = Input(FLOAT32, "as in TurboQuantEncode", when={FEEDBACK})
    frequencies = Input(
        FLOAT32,
        "as in TurboQuantEncode; slots are those of a request, which has no padding",
        when={ROTARY_OFFSETS},
    )

    present = Output(
        BYTES,
        "pages with the new rows [P, S, N, W]; other rows are copied from past. If past and "
        "present are the same buffer, only the new rows are written",
    )

    codec = Attribute(_STRING, Encode.codec.meaning)
    bits = Attribute(_INT, Encode.bits.meaning)
    norm_correction = Attribute(_INT, Encode.norm_correction.meaning)
    recent = Attribute(
        _INT,
        "how many of the newest tokens have entries at most",
        default=0,
        when={EXACT_WINDOW},
    )
    sinks = Attribute(
        _INT, "how many of the first tokens have entries", default=0, when={EXACT_WINDOW}
    )
    row_stride = Attribute(
        _INT, "bytes from a row to the next; 0 for W", default=0, when={EXACT_WINDOW}
    )


class PagedAttention(Operator):
    """Attends to compressed keys and values in pages."""

    name = domain.PAGED_ATTENTION
    summary = """\
Causal attention of packed requests over compressed keys and values in pages, see
TurboQuantPagedEncode and TurboQuantDequantAttention.

Query t of the packed ones, of request r, stands at position
p = past_seqlens[r] + t - cumulative_sequence_length[r]. Key s of the same request is visible iff
s <= p and, with a sliding window, p - s < sliding_window. No query sees keys of another request.

With entries (see TurboQuantPagedEncode), keys and values are vectors in float16 instead for
s < sinks and for the newest tokens: those from p - c + 1 on if that lies in the page of p, where c
is the number of places of newest tokens once p has its row; else those from p - recent + 1 on, as
far as they are in the page of p or belong to the last ones that the page before it still has when
it is full. All are taken as far as they are at hand, as in TurboQuantDequantAttention."""

    query = Input(
        FLOATS, "queries [1, H, T, D]: H is a multiple of N; head h reads KV head h // (H / N)"
    )
    key_cache = Input(BYTES, "pages of compressed keys [P, S, N, Wk], the new ones included")
    value_cache = Input(BYTES, "pages of compressed values [P, S, N, Wv], the new ones included")
    cumulative_sequence_length = Input(INT32, _CUMULATIVE)
    past_seqlens = Input(INT32, _PAST)
    block_table = Input(INT32, _TABLE)
    key_rotation = Input(FLOAT32, Attention.key_rotation.meaning)
    key_centroids = Input(FLOAT32, "codebook of the keys")
    value_rotation = Input(FLOAT32, "likewise of the values")
    value_centroids = Input(FLOAT32, "codebook of the values")
    head_sink = Input(FLOATS, "as in TurboQuantDequantAttention", when={HEAD_SINK})
    key_offset = Input(
        FLOAT32, "as in TurboQuantDequantAttention; slots are those of a request", when={OFFSETS}
    )
    value_offset = Input(FLOAT32, Attention.value_offset.meaning, when={OFFSETS})
    key_frequencies = Input(
        FLOAT32,
        "as in TurboQuantDequantAttention; slots are those of a request",
        when={ROTARY_OFFSETS},
    )
    new_keys = Input(
        FLOATS,
        "keys of the call [1, N, T, D], as TurboQuantPagedEncode gets them; needed with recent or "
        "sinks",
        when={EXACT_WINDOW},
    )
    new_values = Input(FLOATS, "likewise values", when={EXACT_WINDOW})

    output = Output(FLOATS, "attention output [1, H, T, D], in the query's type")

    scale = Attribute(_FLOAT, Attention.scale.meaning)
    sliding_window = Attribute(_INT, Attention.sliding_window.meaning)
    softcap = Attribute(_FLOAT, Attention.softcap.meaning)
    key_codec = Attribute(_STRING, Attention.key_codec.meaning)
    key_bits = Attribute(_INT, Attention.key_bits.meaning)
    value_codec = Attribute(_STRING, Attention.value_codec.meaning)
    value_bits = Attribute(_INT, Attention.value_bits.meaning)
    recent = Attribute(
        _INT,
        "how many of the newest tokens a query reads in float16 at most, its own included; 0 with "
        "raw",
        default=0,
        when={EXACT_WINDOW},
    )
    sinks = Attribute(_INT, Attention.sinks.meaning, default=0, when={EXACT_WINDOW})
    row_stride = Attribute(_INT, PagedEncode.row_stride.meaning, default=0, when={EXACT_WINDOW})


class RmsNormalization(Operator):
    """Divides vectors by the root of the mean of their squares."""

    name = domain.RMS_NORMALIZATION
    summary = """\
Divides vectors by the root of the mean of their squares.

    Y = X / sqrt(mean(X * X) + epsilon) * scale

The mean is over the last dimension; in float32, rounded once."""

    X = Input(FLOATS, "vectors [..., E]")
    scale = Input(FLOATS, "factors [E]")

    Y = Output(FLOATS, "normalised vectors, of X's type and shape")

    epsilon = Attribute(_FLOAT, "added to the mean of the squares; not negative")


class RotaryEmbedding(Operator):
    """Rotates queries or keys by the angles of their positions."""

    name = domain.ROTARY_EMBEDDING
    summary = """\
Rotates queries or keys by the angles of their positions.

With x1 and x2 the halves of a vector, and the cosines and sines of its position's row:

    y1 = x1 * cos - x2 * sin
    y2 = x2 * cos + x1 * sin

In float32, rounded once."""

    X = Input(FLOATS, "vectors [B, N, T, D]: batch, heads, tokens, head size")
    cos_cache = Input(FLOAT32, "cosines by position [P, D / 2]")
    sin_cache = Input(FLOAT32, "sines by position [P, D / 2]")
    position_ids = Input(
        INT64,
        "positions of the tokens, per sequence [B, T] or one row for all [1, T]; from 0, below P",
    )

    Y = Output(FLOATS, "rotated vectors, of X's type and shape")


class Swish(Operator):
    """Multiplies numbers by their sigmoids."""

    name = domain.SWISH
    summary = "The activation Y = X / (1 + exp(-X)), also called SiLU; in float32, rounded once."

    X = Input(FLOATS, "numbers of any shape")

    Y = Output(FLOATS, "their activations, of X's type and shape")


class Transpose(Operator):
    """Exchanges tokens and heads."""

    name = domain.TRANSPOSE
    summary = "Exchanges the two dimensions in the middle: tokens and heads."

    X = Input(FLOATS, "vectors [B, A, C, E]")

    Y = Output(FLOATS, "the same vectors [B, C, A, E]")

    perm = Attribute(ir.AttributeType.INTS, "must be 0, 2, 1, 3")


class Gather(Operator):
    """Looks up rows of a table by their numbers."""

    name = domain.GATHER
    summary = "Looks up rows of a table by their numbers: the embeddings of tokens."

    data = Input(FLOATS, "table of rows [V, E]")
    indices = Input(
        INT64, "row indices [B, T] or [T], from -V to V - 1; negative ones count from the end"
    )

    Y = Output(FLOATS, "the rows [B, T, E] or [T, E]")


OPERATORS: Final[tuple[type[Operator], ...]] = (
    Encode,
    Attention,
    PagedEncode,
    PagedAttention,
    RmsNormalization,
    RotaryEmbedding,
    Swish,
    Transpose,
    Gather,
)
"""All of them."""
BY_NAME: Final = {operator.name: operator for operator in OPERATORS}
