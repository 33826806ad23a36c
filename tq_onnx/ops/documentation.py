"""What the operators say about themselves: shown by Netron, kept in schemas and in function bodies.

Markdown, one text per operator; inputs, outputs and attributes as tables of (name, meaning), in the
order of the operator's formal parameters.
"""

from __future__ import annotations

from typing import Final

ENCODE_SUMMARY: Final = """\
Compresses new key or value vectors and appends them to a key/value cache.

A row of the cache holds one vector: the codes of its coordinates, then little-endian floats
(float16, those of u8 float32). The codec says what they mean:

- `lloyd_max`: the vector is normalised, rotated by an orthogonal matrix R and rounded, coordinate
  by coordinate, to the centroids of a codebook:

      code  = number of boundaries <= (x / |x|) R
      scale = |x| / |centroids[code]|     (|x| alone without norm correction)
      x    ~= scale * centroids[code] R^T

- `prod`: the same with one bit less; then, of the residual r = x - scale * centroids[code] R^T, the
  signs of a random projection S r and |r|, which add sqrt(pi/2) / D * |r| * S^T signs
- `u8`: `lloyd_max` with a byte per code, without norm correction, the scale in float32
- `uniform`: x ~= scale * code + zero, zero the smallest coordinate
- `q8_0`: x ~= scale * code, code a signed byte, one scale for each 32 coordinates
- `fp8_e4m3`: every coordinate as a float of eight bits, E4M3FN, saturating
- `raw`: every coordinate as it is

A vector that is not finite (`lloyd_max`, `prod`, `u8`: whose norm is not) is stored as the zero
vector by all but `raw`. Tables that a codec has no use for are not read; a tensor of one number
stands for each."""

ENCODE_INPUTS: Final = (
    ("vectors", "new vectors [B, N, T, D]: batch, KV heads, new tokens, head size"),
    ("past", "cache so far [B, N, P, W]; W is at least the number of bytes of a row"),
    (
        "past_length",
        "tokens already in the cache, per sequence [B] or one for all [1]; new token t of "
        "sequence b goes to slot past_length[b] + t",
    ),
    (
        "rotation",
        "orthogonal matrix R [D, D], applied to row vectors from the right; with prod "
        "[R | S^T], [D, 2 D]",
    ),
    ("centroids", "codebook, ascending [L]"),
    ("boundaries", "decision boundaries, ascending [L - 1]; ties go up"),
)
OFFSET: Final = (
    "offset",
    "vectors to encode the differences from [K, N, D]: the row in slot p of head n is that of "
    "x - offset[min(p, K - 1), n]",
)
ENCODE_OUTPUTS: Final = (
    (
        "present",
        "cache with the new rows [B, N, S, W], S = max(P, max(past_length) + T); other slots keep "
        "what past holds, or zero bytes, and so do bytes behind a row. When past and present are "
        "the same buffer, only the new rows are written",
    ),
)
ENCODE_ATTRIBUTES: Final = (
    ("codec", "codec kind: lloyd_max, uniform, fp8_e4m3, q8_0, prod, u8 or raw"),
    (
        "bits",
        "bits per coordinate: lloyd_max 2 to 5, uniform 2 to 4, fp8_e4m3 8, q8_0 8, prod 3 or 4, "
        "u8 4, raw those of the element type",
    ),
    (
        "norm_correction",
        "1: the scale makes up for the length that rounding changes; 0: it does not; nothing "
        "but for lloyd_max and prod",
    ),
)
ENCODE_CHOICE: Final = (
    ("codec_index", "number of the codec among those that the function body of this model knows"),
)

ATTENTION_SUMMARY: Final = """\
Scaled dot-product attention over compressed key and value caches.

Grouped-query attention in float32 that decodes rows while it reads them. Where rows are rotated it
works in the rotated space: the query is rotated once, the output is un-rotated once, and no key or
value ever is.

    score(t, s)  = scale * q_t . k_s,  then softcap * tanh(score / softcap) if softcap > 0
    output(t)    = sum over visible s of softmax(score(t, .) + bias)(s) * v_s

Query t of sequence b stands at position p = past_length[b] + t. Key s is visible iff it exists
(s < past_length[b] + T), is not in the future (s <= p, if causal), is within the window
(p - s < sliding_window, if set), and its bias is above half of the lowest finite value of the
bias's type. A query that sees no key gives exact zeros; a hidden key contributes nothing. With
head_sink, exp(head_sink) of the query's head is added to the denominator of the softmax. With
offsets, k_s and v_s are what the rows say plus the offsets of slot s.

Tables that a codec has no use for are not read."""

ATTENTION_INPUTS: Final = (
    ("query", "queries [B, H, T, D]: H is a multiple of N; head h reads KV head h // (H / N)"),
    ("key_cache", "compressed keys [B, N, S, Wk], the new ones included (see TurboQuantEncode)"),
    ("value_cache", "compressed values [B, N, S, Wv], the new ones included"),
    ("past_length", "tokens before the new ones, per sequence [B] or one for all [1]"),
    ("key_rotation", "rotation of the keys, as in TurboQuantEncode"),
    ("key_centroids", "codebook of the keys"),
    ("value_rotation", "rotation of the values"),
    ("value_centroids", "codebook of the values"),
)
ATTENTION_BIAS: Final = (
    "attention_bias",
    "added to the scores; each of its four dimensions is 1 or that of [B, H, T, total], "
    "total = max(past_length) + T; columns beyond total are ignored",
)
HEAD_SINK: Final = (
    "head_sink",
    "one more score per query head [H], neither scaled nor capped, for a key that every query sees "
    "and that has no value: it only widens the denominator of the softmax; minus infinity for none",
)
KEY_OFFSET: Final = (
    "key_offset",
    "what was subtracted from keys before they were encoded [K, N, D]: offset[min(s, K - 1), n] is "
    "added to the key in slot s of head n",
)
VALUE_OFFSET: Final = (
    "value_offset",
    "likewise for values, of the same shape; both or neither",
)
ATTENTION_OPTIONAL: Final = (ATTENTION_BIAS, HEAD_SINK, KEY_OFFSET, VALUE_OFFSET)
ATTENTION_OUTPUTS: Final = (("output", "attention output [B, H, T, D], in the query's type"),)
ATTENTION_ATTRIBUTES: Final = (
    ("scale", "factor on the scores, usually 1 / sqrt(D)"),
    ("causal", "1: a query sees no later key; 0: it sees all that exist"),
    ("sliding_window", "number of visible keys, the query's own included; 0 for all"),
    ("softcap", "bound that scores approach smoothly; 0 for none"),
    ("key_codec", "codec kind of the keys, as in TurboQuantEncode"),
    ("key_bits", "bits per coordinate of the keys, as in TurboQuantEncode"),
    ("value_codec", "codec kind of the values, as in TurboQuantEncode"),
    ("value_bits", "bits per coordinate of the values, as in TurboQuantEncode"),
)
ATTENTION_CHOICE: Final = (
    ("key_codec_index", "number of the keys' codec, as codec_index in TurboQuantEncode"),
    ("value_codec_index", "number of the values' codec, likewise"),
)


def markdown(summary: str, **sections: tuple[tuple[str, str], ...]) -> str:
    """One document: the summary, then one list per section (``inputs=``, ``attributes=`` ...)."""
    parts = [summary]
    for title, entries in sections.items():
        lines = [f"- `{name}`: {meaning}" for name, meaning in entries]
        parts.append("\n".join([f"**{title.capitalize()}**", "", *lines]))
    return "\n\n".join(parts)
