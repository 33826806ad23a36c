"""Random shapes and contents: the reference's answer or an error of the operator, never a crash.

``encode_fits`` and ``attention_fits`` restate what the operators accept; everything else has to be
refused with the operator's name. The draws are the same in every run. To see also the reads that
happen to hit mapped memory, run it on a library built with -DTQ_SANITIZE=ON (Linux):

    LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)" \\
    ASAN_OPTIONS=detect_leaks=0 TQ_ONNX_LIBRARY=... python -m pytest tests/native -k fuzz
"""

from __future__ import annotations

import functools

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.native.conftest import CODECS, Feeds, encoded_vectors, judged_rows, rows, tables
from tests.native.fuzzing import FUZZ, rotation_fits, spoiled
from tests.native.single_node import Array, attention_model, encode_model, make_session, run
from tests.tolerances import bounds
from tq_onnx.codec import reference
from tq_onnx.codec.spec import Codec, row_layout
from tq_onnx.ops.domain import ATTENTION, ENCODE

pytestmark = pytest.mark.usefixtures("exact_products")

FLOATS = bounds("attention")["float32"]
SIZES = [8, 16, 24, 40, 72, 128]
VARIANTS: list[dict[str, object]] = [
    {},
    {"causal": 0},
    {"sliding_window": 2, "softcap": 3.0},
    {"causal": 0, "sliding_window": 1},
]

small = st.integers(0, 3)


@functools.cache
def encode_session(codec: Codec, offset: bool) -> ort.InferenceSession:
    model = encode_model(codec=codec.kind, bits=codec.bits, offset=offset)
    return make_session(model, threads=2)


@functools.cache
def attention_session(
    key: Codec, value: Codec, more: tuple[bool, bool, bool], at: int
) -> ort.InferenceSession:
    bias, sink, offset = more
    model = attention_model(
        bias=bias,
        sink=sink,
        offset=offset,
        scale=0.5,
        key_codec=key.kind,
        key_bits=key.bits,
        value_codec=value.kind,
        value_bits=value.bits,
        **VARIANTS[at],
    )
    return make_session(model, threads=2)


def lengths_fit(past_length: Array, batch: int, slots: int, tokens: int = 0) -> bool:
    return (
        past_length.ndim == 1
        and past_length.size in (1, batch)
        and all(0 <= length <= slots - tokens for length in past_length.tolist())
    )


def encode_fits(feeds: Feeds, codec: Codec) -> bool:
    vectors, past = feeds["vectors"], feeds["past"]
    if vectors.ndim != 4 or past.ndim != 4:
        return False
    size = vectors.shape[3]
    return (
        size % 8 == 0
        and 0 < size <= 512
        and past.shape[:2] == vectors.shape[:2]
        and has_rows(codec, size, past.shape[3])
        and lengths_fit(feeds["past_length"], vectors.shape[0], past.shape[2])
        and tables_fit(codec, size, feeds["rotation"], feeds["centroids"])
        and (not codec.is_rotated or feeds["boundaries"].shape == (codec.boundaries,))
        and ("offset" not in feeds or offset_fits(feeds["offset"], vectors.shape[1], size))
    )


TABLES = ("rotation", "centroids")


def tables_fit(codec: Codec, size: int, rotation: Array, centroids: Array) -> bool:
    if not codec.is_rotated:
        return True
    return rotation_fits(codec, size, rotation) and centroids.shape == (codec.levels,)


def has_rows(codec: Codec, size: int, width: int) -> bool:
    """Whether there are such rows in so many bytes."""
    try:
        return row_layout(codec, size).row_bytes <= width
    except ValueError:
        return False


def offset_fits(offset: Array, heads: int, size: int) -> bool:
    return offset.ndim == 3 and 1 <= len(offset) <= 64 and offset.shape[1:] == (heads, size)


@FUZZ
@given(st.data())
def test_encode(data: st.DataObject) -> None:
    codec = data.draw(st.sampled_from(CODECS))
    size = data.draw(st.sampled_from(SIZES))
    batch, heads, tokens = data.draw(small), data.draw(small), data.draw(st.integers(0, 9))
    slots = data.draw(st.integers(0, 9))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    rotation, centroids, boundaries = tables(codec, size, 0)
    vectors = rng.standard_normal((batch, heads, tokens, size)).astype(np.float32)
    if vectors.size and data.draw(st.booleans()):
        vectors.flat[rng.integers(vectors.size)] = data.draw(
            st.sampled_from([np.nan, np.inf, -3e38, 1e-45])
        )
    count = data.draw(st.sampled_from([1, batch]))
    past_length = st.lists(st.integers(0, slots), min_size=count, max_size=count)
    odd_length = st.lists(st.integers(-1, slots + 1), min_size=count, max_size=count)
    feeds: Feeds = {
        "vectors": vectors,
        "past": rows((batch, heads, slots), codec, size, 2, data.draw(st.sampled_from([0, 3]))),
        "past_length": np.array(data.draw(past_length | odd_length), np.int64).reshape(count),
        "rotation": rotation,
        "centroids": centroids,
        "boundaries": boundaries,
    }
    # A codebook that no converter writes: the codes are free, the slots are not.
    wild = data.draw(st.booleans()) and codec.is_rotated
    if wild:
        odd = np.array([np.nan, np.inf, -np.inf, 0, 1, -2], np.float32)
        for name in ("centroids", "boundaries"):
            feeds[name] = rng.choice(odd, feeds[name].size)
    offsets = data.draw(st.sampled_from([0, 0, 1, 4]))
    if offsets:
        feeds["offset"] = rng.standard_normal((offsets, heads, size)).astype(np.float32)
    feeds = spoiled(data, feeds)
    session = encode_session(codec, bool(offsets))
    if not encode_fits(feeds, codec):
        with pytest.raises(Exception, match=ENCODE):
            run(session, feeds)
        return
    present = run(session, feeds)
    batch, heads, tokens, size = feeds["vectors"].shape
    slots = feeds["past"].shape[2]
    past_length = np.broadcast_to(feeds["past_length"], batch)
    total = max([slots, *(past_length + tokens)])
    assert present.shape == (batch, heads, total, feeds["past"].shape[3])
    expected = np.zeros_like(present)
    expected[:, :, :slots] = feeds["past"]
    new = encoded_vectors(feeds)
    unlike = 0
    for b, length in enumerate(past_length):
        written = slice(length, length + tokens)
        own = present[b, :, written]
        if not wild:
            unlike += judged_rows(own, new[b], codec, feeds).differing
        expected[b, :, written] = own
    np.testing.assert_array_equal(present, expected)
    assert unlike <= 1 + new.size // 500


def attention_fits(feeds: Feeds, key_codec: Codec, value_codec: Codec) -> bool:
    query, key, value = feeds["query"], feeds["key_cache"], feeds["value_cache"]
    if {query.ndim, key.ndim, value.ndim} != {4}:
        return False
    batch, query_heads, tokens, size = query.shape
    heads, slots = key.shape[1:3]
    fits = (
        size % 8 == 0
        and 0 < size <= 512
        and key.shape[0] == batch
        and value.shape[:3] == key.shape[:3]
        and heads > 0
        and query_heads % heads == 0
        and lengths_fit(feeds["past_length"], batch, slots, tokens)
        and (batch > 0 or tokens <= slots)
    )
    for role, cache, codec in (("key", key, key_codec), ("value", value, value_codec)):
        fits = (
            fits
            and has_rows(codec, size, cache.shape[3])
            and tables_fit(codec, size, *(feeds[f"{role}_{name}"] for name in TABLES))
        )
        if "key_offset" in feeds:
            fits = fits and offset_fits(feeds[f"{role}_offset"], heads, size)
    if "key_offset" in feeds:
        fits = fits and feeds["key_offset"].shape == feeds["value_offset"].shape
    fits = fits and ("head_sink" not in feeds or feeds["head_sink"].shape == (query_heads,))
    if not fits or "attention_bias" not in feeds:
        return fits
    bias = feeds["attention_bias"]
    total = tokens + max([0, *feeds["past_length"].tolist()])
    return (
        bias.ndim == 4
        and all(a in (1, b) for a, b in zip(bias.shape[:3], query.shape[:3], strict=True))
        and (bias.shape[3] == 1 or bias.shape[3] >= total)
    )


@FUZZ
@given(st.data())
def test_attention(data: st.DataObject) -> None:
    key, value = (data.draw(st.sampled_from(CODECS)) for _ in range(2))
    size = data.draw(st.sampled_from(SIZES))
    batch, heads, group = data.draw(small), data.draw(small), data.draw(small)
    tokens, past = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 70))
    slots = past + tokens + data.draw(st.integers(-1, 3))
    with_bias, at = data.draw(st.booleans()), data.draw(st.integers(0, len(VARIANTS) - 1))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    count = data.draw(st.sampled_from([1, batch]))
    lowest = data.draw(st.sampled_from([past, 0, -1]))
    padding = data.draw(st.sampled_from([0, 2]))
    key_rotation, key_centroids, _ = tables(key, size, 0)
    value_rotation, value_centroids, _ = tables(value, size, 1)
    query = rng.standard_normal((batch, heads * group, tokens, size)).astype(np.float32)
    feeds: Feeds = {
        "query": query,
        "key_cache": rows((batch, heads, max(0, slots)), key, size, 4, padding),
        "value_cache": rows((batch, heads, max(0, slots)), value, size, 5, padding),
        "past_length": rng.integers(min(lowest, past), past + 1, count),
        "key_rotation": key_rotation,
        "key_centroids": key_centroids,
        "value_rotation": value_rotation,
        "value_centroids": value_centroids,
    }
    if with_bias:
        full = (batch, heads * group, tokens, past + tokens + 2)
        shape = [data.draw(st.sampled_from([1, dim])) for dim in full]
        bias = rng.standard_normal(shape).astype(np.float32)
        bias[rng.random(shape) < 0.3] = -np.inf
        feeds["attention_bias"] = bias
    with_sink = data.draw(st.booleans())
    if with_sink:
        sinks = rng.choice(np.array([-np.inf, -3e38, -1.5, 0, 2, 90], np.float32), heads * group)
        feeds["head_sink"] = sinks
    offsets = data.draw(st.sampled_from([0, 0, 1, 6, 64]))
    for name in ("key_offset", "value_offset") if offsets else ():
        feeds[name] = rng.standard_normal((offsets, heads, size)).astype(np.float32)
    feeds = spoiled(data, feeds)
    session = attention_session(key, value, (with_bias, with_sink, bool(offsets)), at)
    if not attention_fits(feeds, key, value):
        with pytest.raises(Exception, match=ATTENTION):
            run(session, feeds)
        return
    output = run(session, feeds)
    assert output.shape == feeds["query"].shape
    if output.size == 0:
        return
    variant = {"scale": 0.5, "causal": True, **VARIANTS[at]}
    expected = reference.attention(
        feeds["query"], feeds["key_cache"], feeds["value_cache"], feeds["past_length"],
        key=key, value=value,
        key_rotation=feeds["key_rotation"], key_codebook=feeds["key_centroids"],
        value_rotation=feeds["value_rotation"], value_codebook=feeds["value_centroids"],
        attention_bias=feeds.get("attention_bias"), head_sink=feeds.get("head_sink"),
        key_offset=feeds.get("key_offset"), value_offset=feeds.get("value_offset"), **variant,
    )  # fmt: skip
    most = FLOATS * (1 + np.abs(expected).max())
    np.testing.assert_allclose(output, expected, rtol=0, atol=most)
