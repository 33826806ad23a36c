"""Random shapes and contents: the reference's answer or an error of the operator, never a crash.

``encode_fits`` and ``attention_fits`` restate what the operators accept; everything else has to be
refused with the operator's name. The draws are the same in every run. To see also the reads that
happen to hit mapped memory, run it on a library built with -DTQ_SANITIZE=ON (Linux):

    LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)" \\
    ASAN_OPTIONS=detect_leaks=0 TQ_ONNX_LIBRARY=... python -m pytest tests/native/test_fuzz.py
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.native.conftest import Feeds, codec_of, rows, tables
from tests.native.single_node import Array, attention_model, encode_model, make_session, run
from tq_onnx.codec import reference
from tq_onnx.codec.codebook import lloyd_max
from tq_onnx.codec.spec import row_layout
from tq_onnx.ops.domain import ATTENTION, ENCODE

FUZZ = settings(
    max_examples=200,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
SIZES = [8, 16, 24, 40, 72, 128]
VARIANTS: list[dict[str, object]] = [
    {},
    {"causal": 0},
    {"sliding_window": 2, "softcap": 3.0},
    {"causal": 0, "sliding_window": 1},
]

small = st.integers(0, 3)


@functools.cache
def encode_session(bits: int) -> ort.InferenceSession:
    return make_session(encode_model(codec=codec_of(bits).kind, bits=bits), threads=2)


@functools.cache
def attention_session(
    key_bits: int, value_bits: int, bias: bool, sink: bool, at: int
) -> ort.InferenceSession:
    model = attention_model(
        bias=bias,
        sink=sink,
        scale=0.5,
        key_codec=codec_of(key_bits).kind,
        key_bits=key_bits,
        value_codec=codec_of(value_bits).kind,
        value_bits=value_bits,
        **VARIANTS[at],
    )
    return make_session(model, threads=2)


def spoiled(data: st.DataObject, feeds: Mapping[str, Array]) -> Feeds:
    """Now and then one input with another shape (which may still fit)."""
    out = dict(feeds)
    if data.draw(st.integers(0, 2)):
        return out
    name = data.draw(st.sampled_from(sorted(out)))
    shape = list(out[name].shape)
    change = data.draw(st.sampled_from(["rank", "more", "dimension"]))
    if change == "rank":
        shape = shape[1:]
    elif change == "more":
        shape = [1, *shape]
    else:
        at = data.draw(st.integers(0, len(shape) - 1))
        shape[at] = data.draw(st.sampled_from([0, 1, shape[at] - 1, shape[at] + 1, 8]))
        shape[at] = max(0, shape[at])
    out[name] = np.resize(out[name], shape) if out[name].size else np.zeros(shape, out[name].dtype)
    return out


def lengths_fit(past_length: Array, batch: int, slots: int, tokens: int = 0) -> bool:
    return (
        past_length.ndim == 1
        and past_length.size in (1, batch)
        and all(0 <= length <= slots - tokens for length in past_length.tolist())
    )


def encode_fits(feeds: Feeds, bits: int) -> bool:
    vectors, past = feeds["vectors"], feeds["past"]
    if vectors.ndim != 4 or past.ndim != 4:
        return False
    size = vectors.shape[3]
    return (
        size % 8 == 0
        and 0 < size <= 512
        and past.shape[:2] == vectors.shape[:2]
        and past.shape[3] == row_layout(codec_of(bits), size).row_bytes
        and lengths_fit(feeds["past_length"], vectors.shape[0], past.shape[2])
        and tables_fit(bits, size, feeds["rotation"], feeds["centroids"])
        and (codec_of(bits).is_raw or feeds["boundaries"].shape == (2**bits - 1,))
    )


def tables_fit(bits: int, size: int, rotation: Array, centroids: Array) -> bool:
    if codec_of(bits).is_raw:
        return True
    return rotation.shape == (size, size) and centroids.shape == (2**bits,)


@FUZZ
@given(st.data())
def test_encode(data: st.DataObject) -> None:
    bits = data.draw(st.sampled_from([2, 3, 4, 32]))
    size = data.draw(st.sampled_from(SIZES))
    batch, heads, tokens = data.draw(small), data.draw(small), data.draw(st.integers(0, 9))
    slots = data.draw(st.integers(0, 9))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    codec = codec_of(bits)
    book = None if codec.is_raw else lloyd_max(bits, size)
    rotation, centroids, boundaries = tables(bits, size, 0)
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
        "past": rows((batch, heads, slots), bits, size, 2),
        "past_length": np.array(data.draw(past_length | odd_length), np.int64).reshape(count),
        "rotation": rotation,
        "centroids": centroids,
        "boundaries": boundaries,
    }
    # A codebook that no converter writes: the codes are free, the slots are not.
    wild = data.draw(st.booleans()) and not codec.is_raw
    if wild:
        for name in ("centroids", "boundaries"):
            values = rng.choice(np.array([np.nan, np.inf, -np.inf, 0, 1, -2], np.float32), 2**bits)
            feeds[name] = values[: feeds[name].size]
    feeds = spoiled(data, feeds)
    session = encode_session(bits)
    if not encode_fits(feeds, bits):
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
    new = reference.encode(feeds["vectors"], codec, feeds["rotation"], book)
    for b, length in enumerate(past_length):
        written = slice(length, length + tokens)
        expected[b, :, written] = present[b, :, written] if wild else new[b]
    ties = 0 if codec.is_raw else 1 + new.size // 500
    assert np.count_nonzero(present != expected) <= ties


def attention_fits(feeds: Feeds, key_bits: int, value_bits: int) -> bool:
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
    for role, cache, bits in (("key", key, key_bits), ("value", value, value_bits)):
        fits = (
            fits
            and cache.shape[3] == row_layout(codec_of(bits), size).row_bytes
            and tables_fit(bits, size, feeds[f"{role}_rotation"], feeds[f"{role}_centroids"])
        )
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
    key_bits, value_bits = (data.draw(st.sampled_from([2, 3, 4, 32])) for _ in range(2))
    size = data.draw(st.sampled_from(SIZES))
    batch, heads, group = data.draw(small), data.draw(small), data.draw(small)
    tokens, past = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 70))
    slots = past + tokens + data.draw(st.integers(-1, 3))
    with_bias, at = data.draw(st.booleans()), data.draw(st.integers(0, len(VARIANTS) - 1))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    count = data.draw(st.sampled_from([1, batch]))
    lowest = data.draw(st.sampled_from([past, 0, -1]))
    key_rotation, key_centroids, _ = tables(key_bits, size, 0)
    value_rotation, value_centroids, _ = tables(value_bits, size, 1)
    query = rng.standard_normal((batch, heads * group, tokens, size)).astype(np.float32)
    feeds: Feeds = {
        "query": query,
        "key_cache": rows((batch, heads, max(0, slots)), key_bits, size, 4),
        "value_cache": rows((batch, heads, max(0, slots)), value_bits, size, 5),
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
    feeds = spoiled(data, feeds)
    session = attention_session(key_bits, value_bits, with_bias, with_sink, at)
    if not attention_fits(feeds, key_bits, value_bits):
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
        key=codec_of(key_bits), value=codec_of(value_bits),
        key_rotation=feeds["key_rotation"], key_codebook=feeds["key_centroids"],
        value_rotation=feeds["value_rotation"], value_codebook=feeds["value_centroids"],
        attention_bias=feeds.get("attention_bias"), head_sink=feeds.get("head_sink"), **variant,
    )  # fmt: skip
    np.testing.assert_allclose(output, expected, rtol=0, atol=1e-4 * (1 + np.abs(expected).max()))
