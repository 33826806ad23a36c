"""What the operators say about themselves: shown by Netron, kept in schemas and in function bodies.

Markdown, one text per operator; inputs, outputs and attributes as tables of (name, meaning), in the
order of the operator's formal parameters.
"""

from __future__ import annotations

from typing import Final

ENCODE_SUMMARY: Final = """\
Compresses new key or value vectors with TurboQuant and appends them to a key/value cache.

Each vector is normalised, rotated by an orthogonal matrix and rounded, coordinate by coordinate, to
the centroids of a Lloyd-Max codebook; a row of the cache holds the codes, in bit planes, and then
one little-endian float16 scale:

    norm   = |x|
    codes  = number of boundaries <= (x / norm) R, per coordinate
    scale  = norm / |centroids[codes]|     (norm alone without norm correction)
    x     ~= scale * centroids[codes] R^T

A vector whose norm is zero, NaN or infinite is stored with scale 0 and decodes to zeros.

With the codec raw a row is the vector itself: its elements, little endian. The tables are then not
read; a tensor of one number stands for each."""

ENCODE_INPUTS: Final = (
    ("vectors", "new vectors [B, N, T, D]: batch, KV heads, new tokens, head size"),
    ("past", "cache so far [B, N, P, W]; W is the number of bytes of a row"),
    (
        "past_length",
        "tokens already in the cache, per sequence [B] or one for all [1]; new token t of "
        "sequence b goes to slot past_length[b] + t",
    ),
    ("rotation", "orthogonal matrix R [D, D], applied to row vectors from the right"),
    ("centroids", "codebook, ascending [2^bits]"),
    ("boundaries", "decision boundaries, ascending [2^bits - 1]; ties go up"),
)
ENCODE_OUTPUTS: Final = (
    (
        "present",
        "cache with the new rows [B, N, S, W], S = max(P, max(past_length) + T); other slots keep "
        "what past holds, or zero bytes. When past and present are the same buffer, only the new "
        "rows are written",
    ),
)
ENCODE_ATTRIBUTES: Final = (
    ("codec", "codec kind: lloyd_max or raw"),
    ("bits", "bits per coordinate: 2, 3 or 4; those of the element type with raw"),
    (
        "norm_correction",
        "1: the scale makes up for the length that rounding changes; 0: it does not; nothing with "
        "raw",
    ),
)

ATTENTION_SUMMARY: Final = """\
Scaled dot-product attention over TurboQuant-compressed key and value caches.

Grouped-query attention in float32 that decodes rows while it reads them. It works in the rotated
space: the query is rotated once, the output is un-rotated once, and no key or value ever is.

    score(t, s)  = scale * q_t . k_s,  then softcap * tanh(score / softcap) if softcap > 0
    output(t)    = sum over visible s of softmax(score(t, .) + bias)(s) * v_s

Query t of sequence b stands at position p = past_length[b] + t. Key s is visible iff it exists
(s < past_length[b] + T), is not in the future (s <= p, if causal), is within the window
(p - s < sliding_window, if set), and its bias is above half of the lowest finite value of the
bias's type. A query that sees no key gives exact zeros; a hidden key contributes nothing. With
head_sink, exp(head_sink) of the query's head is added to the denominator of the softmax.

Rows of the codec raw hold the vectors themselves, not rotated; their tables are not read."""

ATTENTION_INPUTS: Final = (
    ("query", "queries [B, H, T, D]: H is a multiple of N; head h reads KV head h // (H / N)"),
    ("key_cache", "compressed keys [B, N, S, Wk], the new ones included (see TurboQuantEncode)"),
    ("value_cache", "compressed values [B, N, S, Wv], the new ones included"),
    ("past_length", "tokens before the new ones, per sequence [B] or one for all [1]"),
    ("key_rotation", "orthogonal matrix of the keys [D, D]"),
    ("key_centroids", "codebook of the keys [2^key_bits]"),
    ("value_rotation", "orthogonal matrix of the values [D, D]"),
    ("value_centroids", "codebook of the values [2^value_bits]"),
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
ATTENTION_OUTPUTS: Final = (("output", "attention output [B, H, T, D], in the query's type"),)
ATTENTION_ATTRIBUTES: Final = (
    ("scale", "factor on the scores, usually 1 / sqrt(D)"),
    ("causal", "1: a query sees no later key; 0: it sees all that exist"),
    ("sliding_window", "number of visible keys, the query's own included; 0 for all"),
    ("softcap", "bound that scores approach smoothly; 0 for none"),
    ("key_codec", "codec kind of the keys: lloyd_max or raw"),
    ("key_bits", "bits per coordinate of the keys, as in TurboQuantEncode"),
    ("value_codec", "codec kind of the values: lloyd_max or raw"),
    ("value_bits", "bits per coordinate of the values, as in TurboQuantEncode"),
)


def markdown(summary: str, **sections: tuple[tuple[str, str], ...]) -> str:
    """One document: the summary, then one list per section (``inputs=``, ``attributes=`` ...)."""
    parts = [summary]
    for title, entries in sections.items():
        lines = [f"- `{name}`: {meaning}" for name, meaning in entries]
        parts.append("\n".join([f"**{title.capitalize()}**", "", *lines]))
    return "\n\n".join(parts)
